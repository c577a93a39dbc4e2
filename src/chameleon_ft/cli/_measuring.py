"""Measuring a profile at the command line: for `chameleon profile`, and for commands that are given none."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from chameleon_ft.cli._preflight import absolute_job, prepare_data_of
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.profiles import Profile, cached_profile, profile_cache, profile_cache_file

__all__ = ["measured_or_cached", "measured_profile"]

_QUICK_REPEATS: Final = 10


def measured_profile(config: RunConfig, *, repeats: int, peer: str | None, command: str) -> Profile:
    """Measure the job of `config` on the device at hand, and say what is being measured to a person at a terminal.

    Raises as `measure_profile` does, and DataError.
    """
    # Loads torch.
    from chameleon_ft.runtime.profiling import Measuring, measure_profile

    how = Measuring(repeats=repeats, peer=peer, command=command, progress=_progress)
    config = config.model_copy(update={"job": absolute_job(config.job)})
    with tempfile.TemporaryDirectory(prefix="chameleon-profile-") as folder:
        config = config.model_copy(update={"output_dir": Path(folder)})
        prepare_data_of(config)
        profile = measure_profile(config, how)
    _progress("")
    return profile


def measured_or_cached(config: RunConfig, path: Path, *, environ: Mapping[str, str] = os.environ) -> Profile:
    """The profile of the job of `config`, which `path` describes: from the user's cache, or measured and kept there.

    Says on standard error where it is from. Raises as `measured_profile` does.
    """
    from chameleon_ft.runtime.inspection import inspect_job

    fingerprint = inspect_job(config).profiled_as(config)
    file = profile_cache_file(profile_cache(environ), fingerprint, backend=config.backend)
    measured = False

    def measure() -> Profile:
        nonlocal measured
        measured = True
        _tell(f"{path} has no profile: measuring what its layers and links cost, which takes some seconds")
        try:
            return measured_profile(config, repeats=_QUICK_REPEATS, peer=None, command=f"chameleon plan {path}")
        except ConfigError as error:
            raise ConfigError(f"{error}; or give a profile that was measured elsewhere by --profile") from None

    profile = cached_profile(file, fingerprint, measure)
    kept = "kept in" if measured else "taken from"
    if file.is_file():
        _tell(f"profile {kept} {file}: {profile.provenance}; remove the file to have it measured again")
    return profile


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(what: str) -> None:
    """Say what is being measured, in one line that is written over, to a person at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
