"""`chameleon coordinator`: run the coordinator of a run that spans several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from chameleon_ft.cli.arguments import OptionalPath, metavar
from chameleon_ft.cli.starting import ConfigFile, Forks, Resume, lost_run, parse_start, prepare_run
from chameleon_ft.errors import ConfigError

__all__ = ["main"]


@dataclass(frozen=True)
class CoordinatorArguments:
    """Run the coordinator of a run that spans several machines. It decides, records and displays; it does not compute.

    Set control.host to an address that the other machines reach. The coordinator prints the address and the token that
    `chameleon agent` and `chameleon worker` need, and waits until all `workers` have joined.
    """

    config: ConfigFile = None
    resume: Resume = None
    fork: Forks = False
    take_over: Annotated[
        OptionalPath,
        metavar("RUN", "Directory of a live run whose coordinator is lost: continue it in place of that one."),
    ] = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(CoordinatorArguments, arguments, command="coordinator")
    if given.take_over is not None:
        if flags or given.config is not None or given.resume is not None:
            raise ConfigError(f"--take-over {given.take_over}: the run goes on as it is; leave out all other arguments")
        lost = lost_run(given.take_over)
        from chameleon_ft.launch import take_over

        return take_over(lost.config, run=lost.directory)
    prepared = prepare_run(flags, file=given.config, resume=given.resume, fork=given.fork)
    from chameleon_ft.launch import coordinate

    return prepared.start(coordinate)
