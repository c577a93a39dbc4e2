"""`chameleon profile`: what layers, operations and links cost, measured or derived."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from chameleon_ft.cli._config_file import config_values
from chameleon_ft.cli._flags import Switch, optional_argument, parse_arguments
from chameleon_ft.cli._measuring import measured_profile
from chameleon_ft.cli._presets import NO_PRESET, Preset
from chameleon_ft.cli._written import require_places
from chameleon_ft.config import RunConfig, config_type, parse_config
from chameleon_ft.errors import ConfigError
from chameleon_ft.profiles import Profile, write_profile

__all__ = ["main"]


@dataclass(frozen=True)
class ProfileArguments:
    """Measure what the layers of a job, an operation and the links between workers cost on the device at hand.

    For the job that CONFIG describes, which is a TOML file as for `chameleon train` or the Python file of a job as for
    `chameleon run`; or derived, without running anything, for a published --model on a known --device. For the link to
    another host, run `chameleon profile --serve HOST:PORT` there and name it here by --peer HOST:PORT.
    """

    config: Annotated[
        Optional[Path],  # noqa: UP045
        tyro.conf.Positional,
        optional_argument("[CONFIG]", "TOML file of a run, or the Python file of a job."),
    ] = None
    out: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "New file that the profile is written to."),
    ] = None
    repeats: Annotated[int, tyro.conf.arg(help="How often each time is taken; the median counts.")] = 20
    peer: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument("HOST:PORT", "Where another host answers, to measure the link to it as well."),
    ] = None
    serve: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument("HOST:PORT", "Answer those who measure the link to this host, until Ctrl-C."),
    ] = None
    preset: Preset = NO_PRESET
    json: Annotated[Switch, optional_argument("", "Print the profile as JSON.")] = False


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(ProfileArguments, arguments, command="profile")
    _check(given)
    if given.serve is not None:
        from chameleon_ft.runtime.profiling import serve_link

        serve_link(given.serve, tell=_tell)
        return 0
    out = _free(given.out)
    profile = given.preset.profile() if given.config is None else _measured(given, given.config, arguments)
    write_profile(profile, out)
    if given.json:
        print(out.read_text(encoding="utf-8"), end="")
        return 0
    from chameleon_ft.cli._profile_view import show

    show(profile, out)
    return 0


def _check(given: ProfileArguments) -> None:
    """Raise ConfigError where the arguments do not go together."""
    if given.serve is not None:
        if (given.config, given.preset, given.peer, given.out) != (None, NO_PRESET, None, None):
            raise ConfigError(f"--serve {given.serve}: only answers; the host that measures names what and where to")
        return
    if given.repeats < 1:
        raise ConfigError(f"--repeats {given.repeats}: should be 1 or more")
    if given.config is not None:
        given.preset.refuse(
            f"is for --model, and {given.config} says what is measured; leave one of them out",
            but=("micro_batch_size",),
        )
    elif given.preset.model is None:
        raise ConfigError("nothing to profile: give a CONFIG, or a published --model and its --device")
    if given.config is None and given.peer is not None:
        raise ConfigError(f"--peer {given.peer}: the links of --device are known; it is for measuring, with a CONFIG")


def _free(out: Path | None) -> Path:
    """Return where the profile can be written, before any time is spent on it. Raises ConfigError."""
    if out is None:
        raise ConfigError("--out is missing: name the file that the profile is to be written to")
    if out.exists():
        raise ConfigError(f"--out {out}: exists already; name a new file, or remove it")
    require_places(profile=out)
    return out


def _measured(given: ProfileArguments, file: Path, arguments: Sequence[str]) -> Profile:
    command = shlex.join(["chameleon", "profile", *arguments])
    config = _config(file, given.preset.size)
    return measured_profile(config, repeats=given.repeats, peer=given.peer, command=command)


def _config(file: Path, size: int | None) -> RunConfig:
    """Read the configuration that `file` is, or the one beside it if it is a job. Raises ConfigError.

    A micro-batch `size` goes over the one that it says.
    """
    values = config_values(file)
    if size is not None:
        values["batch"] = {**values.get("batch", {}), "micro_batch_size": size}
    values.pop("failures", None)  # they are for a run
    return parse_config(config_type(values), values, source=str(file))


def _tell(what: str) -> None:
    print(what, flush=True)
