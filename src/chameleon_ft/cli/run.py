"""`chameleon run`: a model of the user's own, all processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Optional

import tyro

from chameleon_ft.cli._flags import optional_argument
from chameleon_ft.cli._preflight import absolute_job
from chameleon_ft.cli._prepare import ConfigFile, Resume, StartArguments, prepare_run
from chameleon_ft.errors import ConfigError

__all__ = ["main"]


@dataclass(frozen=True)
class RunArguments(StartArguments):
    """Train a model of your own, with all its worker processes on this machine.

    JOB is a Python file, or a module, with a function `job()` that returns a chameleon_ft.Job; a function of another
    name is given as JOB:FUNCTION. Every field of the configuration is a flag. What a flag does not set comes from
    CONFIG, or without it from the TOML file of the same name beside the Python file if there is one, and what that
    leaves out has the default shown here. With --resume JOB may be left out: it is that of the run.
    """

    script: Annotated[
        Optional[str],  # noqa: UP045
        tyro.conf.Positional,
        optional_argument("JOB", "path/to/file.py[:FUNCTION] or module[:FUNCTION]"),
    ] = None
    config: ConfigFile = None
    resume: Resume = None

    without: ClassVar[tuple[str, ...]] = ("job",)

    def config_file(self) -> Path | None:
        """Return the configuration file, if there is one: the one given, or the one beside the script."""
        if self.config is not None:
            return self.config
        file = self._file()
        if not file.name:
            return None  # no file at all: what is wrong with it is said where the job is looked up
        beside = file.with_suffix(".toml")
        return beside if beside.is_file() else None

    def job(self) -> str | None:
        """Return the reference of the job; None for that of the run to go on with."""
        if self.script is not None:
            return absolute_job(self.script)
        if self.resume is None:
            raise ConfigError("JOB is missing: name the Python file, or module, with a function job()")
        return None

    def name(self) -> str:
        """Return the word that names the run."""
        return self._file().stem

    def _file(self) -> Path:
        return Path((self.script or "").partition(":")[0])


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prepared = prepare_run(RunArguments, arguments, command="run")
    from chameleon_ft.launch import train

    return prepared.start(train)
