"""`chameleon run`: train a model of your own, all processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from chameleon_ft.cli.arguments import OptionalStr, Page, metavar, page_beside, with_page_address
from chameleon_ft.cli.starting import AUTO, ConfigFile, Forks, Resume, absolute_job, parse_start, prepare_run
from chameleon_ft.errors import ConfigError


@dataclass(frozen=True)
class RunArguments:
    """Train a model of your own, with all worker processes on this machine.

    JOB is a Python file or a module with a function `job()` that returns a chameleon_ft.Job; write JOB:FUNCTION if
    the function has another name. Every field that is set by hand is a flag. A flag overrides CONFIG, which defaults
    to the TOML file of the same name beside the Python file, if there is one. Fields that neither sets have the
    defaults shown here. With --resume, JOB may be left out, because the run has recorded it.
    """

    script: Annotated[OptionalStr, tyro.conf.Positional, metavar("JOB")] = None
    """path/to/file.py[:FUNCTION] or module[:FUNCTION]"""
    config: ConfigFile = None
    resume: Resume = None
    fork: Forks = False
    page: Page = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(RunArguments, with_page_address(arguments), command="run", without=("job",))
    if given.script is None and given.resume in (None, AUTO):
        raise ConfigError("JOB is missing: give the Python file or module with the function job()")
    job = None if given.script is None else absolute_job(given.script)
    script = Path((given.script or "").partition(":")[0])
    file = given.config
    if file is None and given.resume in (None, AUTO) and (beside := script.with_suffix(".toml")).is_file():
        file = beside
    with page_beside(given.page) as shown:
        prepared = prepare_run(flags, file=file, resume=given.resume, fork=given.fork, job=job, name=script.stem)
        from chameleon_ft.launch.local import train

        with shown(prepared.directory):
            return prepared.start(train)
