"""`chameleon run`: train a model of your own, all processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from chameleon_ft.cli.arguments import Page, StartArguments, page_beside, parse_start, with_page_address
from chameleon_ft.errors import ConfigError
from chameleon_ft.session.configuration import AUTO, RunRequest
from chameleon_ft.session.start import prepare_run


@dataclass(frozen=True, kw_only=True)
class _JobArgument:
    script: Annotated[str | None, "JOB"] = None
    """path/to/file.py[:FUNCTION] or module[:FUNCTION]"""


@dataclass(frozen=True, kw_only=True)
class RunArguments(StartArguments, _JobArgument):
    """Train a model of your own, with all worker processes on this machine.

    JOB is a Python file or a module with a function `job()` that returns a chameleon_ft.Job; write JOB:FUNCTION if
    the function has another name. Every field that is set by hand is a flag. A flag overrides CONFIG, which defaults
    to the TOML file of the same name beside the Python file, if there is one. Fields that neither sets have the
    defaults shown here. With --resume, JOB may be left out, because the run has recorded it.
    """

    page: Page = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(
        RunArguments, with_page_address(arguments), command="run", positional=("script", "config"), own_job=True
    )
    if given.script is None and given.resume in (None, AUTO):
        raise ConfigError("JOB is missing: give the Python file or module with the function job()")
    request = given.request(flags)
    if given.script is not None:
        request = RunRequest.of_job(
            given.script, file=given.config, changes=flags, resume=given.resume, fork=given.fork
        )
    with page_beside(given.page) as shown:
        prepared = prepare_run(request)
        from chameleon_ft.launch.local import train

        with shown(prepared.directory):
            return prepared.start(train)
