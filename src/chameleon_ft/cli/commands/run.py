"""`chameleon run`: train a model of your own, all processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from chameleon_ft.cli.arguments import Page, StartArguments, page_beside, parse_start, with_page_address
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.reference import arguments_of_job
from chameleon_ft.session.configuration import AUTO
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
    defaults shown here. Arguments of the function that have defaults are flags, too: --job.NAME VALUE; `chameleon run
    JOB --help` lists them. With --resume, JOB may be left out, because the run has recorded it.
    """

    page: Page = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    if arguments and {"-h", "--help"} & set(arguments[1:]) and not arguments[0].startswith("-"):
        _print_arguments(arguments[0])
    given, flags = parse_start(
        RunArguments, with_page_address(arguments), command="run", positional=("script", "config"), own_job=True
    )
    if given.script is None and given.resume in (None, AUTO):
        raise ConfigError("JOB is missing: give the Python file or module with the function job()")
    request = given.request(flags)
    if given.script is not None:
        request = request.of_job(given.script)
    with page_beside(given.page) as shown:
        prepared = prepare_run(request)
        from chameleon_ft.launch.local import train

        with shown(prepared.directory):
            return prepared.start(train)


def _print_arguments(job: str) -> None:
    """Print the arguments of a job's function that are flags. Raises ConfigError if it cannot be loaded."""
    # Loads torch, as does the job itself.
    from chameleon_ft.worker.inspection import users_errors

    config = RunConfig(job=job)
    with users_errors(config):
        found = [each for each in arguments_of_job(job, config) if each.choices]
    print(f"arguments of {job}:" if found else f"{job} has no arguments that are flags")
    for each in found:
        print(f"  --job.{each.name.replace('_', '-')}: {each.description}")
    print()
