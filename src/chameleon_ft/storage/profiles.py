"""Profiles as JSON files: of a run, and kept for the next command that needs them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from chameleon_ft.config import RunConfig
from chameleon_ft.cost.profile import Fingerprint, Profile
from chameleon_ft.errors import ConfigError, ProfileError
from chameleon_ft.schedule import CostModel

_BF16 = ("bf16", "bfloat16")

_logger = logging.getLogger(__name__)


class _File(BaseModel):
    """The whole file; its content is validated as strictly."""

    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")

    format: Literal["chameleon-profile-1"] = "chameleon-profile-1"
    profile: Profile


def read_profile(path: Path) -> Profile:
    """Read a file of `write_profile`.

    Raises:
        ProfileError: no such file, or not a profile; the message names the field and what is wrong with it.
    """
    try:
        return _File.model_validate_json(path.read_bytes()).profile
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        problem = "is missing" if first["type"] == "missing" else first["msg"]
        place = "".join(f"{each}." for each in first["loc"]).rstrip(".")
        problem = f"{place}: {problem}" if place else problem
        raise ProfileError(f"profile {path}: {problem}; give a file of `chameleon profile`") from None
    except ConfigError as error:
        raise ProfileError(f"profile {path}: {error}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON. Raises ProfileError if that fails."""
    content = _File.model_construct(profile=profile).model_dump_json(indent=1)
    try:
        path.write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be written: {error.strerror}") from None


def profile_cache(environ: Mapping[str, str]) -> Path:
    """Return the user's folder of cached profiles, by the XDG base directory specification."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    # The specification has relative paths ignored.
    base = base if base.is_absolute() else Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return base / "chameleon-ft" / "profiles"


def profile_cache_file(folder: Path, fingerprint: Fingerprint, *, backend: str) -> Path:
    """Return the file of a profile, a different one for every fingerprint and every library that sent the messages."""
    key = json.dumps([dataclasses.asdict(fingerprint), backend], sort_keys=True)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def cached_profile(file: Path, fingerprint: Fingerprint, measure: Callable[[], Profile]) -> Profile:
    """Return the profile in `file`, or measure it and write it there.

    A file that is damaged or of another fingerprint is replaced. A profile that cannot be written is returned
    nevertheless. Raises the errors of `measure`.
    """
    try:
        found = read_profile(file)
        if found.fingerprint == fingerprint:
            return found
        _logger.info("profile %s is of %s, not of %s", file, found.fingerprint, fingerprint)
    except ProfileError as error:
        _logger.info("no profile in the cache: %s", error)
    profile = measure()
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_profile(profile, draft)
        draft.replace(file)
    except (OSError, ProfileError) as error:
        _logger.warning("the profile cannot be cached: %s", error)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return profile


def profile_of_run(config: RunConfig) -> Profile:
    """Return the profile of a run; an emulated device may be slower than the file says.

    Raises:
        ProfileError: it cannot be read, is of another micro-batch size or of layers compiled in another way, or lacks
            the precision that emulated devices are to have.
    """
    if config.profile is None:
        raise ProfileError("this run has no profile; set profile")
    profile = read_profile(config.profile)
    profile.require({"micro_batch_size": config.batch.micro_batch_size, "compile": config.compiled})
    if not config.is_emulated:
        return profile
    if config.precision == "bf16" and profile.fingerprint.dtype not in _BF16:
        raise ProfileError(
            f'precision = "bf16": the profile of {profile.name} was made for {profile.fingerprint.dtype}, and the '
            "messages of an emulated device have its bytes; make one for bf16, or leave precision out"
        )
    return profile.slowed(config.emulation.time_scale, min_latency_s=config.emulation.min_message_s)


def costs_of_run(config: RunConfig, profile: Profile, hosts: Mapping[int, str]) -> CostModel:
    """Return the cost model of a step on the workers of `hosts`: worker -> host, replaced as by `hosts_of_run`.

    Raises ProfileError as `Profile.cluster` does.
    """
    costs = profile.costs(config.batch.micro_batches, hosts_of_run(config, hosts))
    return dataclasses.replace(costs, workload=dataclasses.replace(costs.workload, owners=config.parallel.owners))


def hosts_of_run(config: RunConfig, hosts: Mapping[int, str]) -> Mapping[int, str]:
    """Return the host of each worker of `hosts`; of emulated devices, the emulated host."""
    if not config.is_emulated:
        return hosts
    return {worker: f"host{worker // config.emulation.workers_per_host}" for worker in hosts}
