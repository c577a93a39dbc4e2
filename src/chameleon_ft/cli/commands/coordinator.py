"""`chameleon coordinator`: run the coordinator of a run that spans several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from chameleon_ft.cli.arguments import OptionalPath, OptionalStr, metavar
from chameleon_ft.cli.joining import JoinArguments
from chameleon_ft.cli.live_runs import lost_run
from chameleon_ft.cli.starting import ConfigFile, Forks, Resume, parse_start, prepare_run
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["main"]


@dataclass(frozen=True)
class CoordinatorArguments:
    """Run the coordinator of a run that spans several machines. It decides, records and displays; it does not compute.

    Set control.host to an address that the other machines reach, or to auto. The coordinator prints the address and the
    token that `chameleon agent` and `chameleon worker` need, and waits until all `workers` have joined.
    """

    config: ConfigFile = None
    resume: Resume = None
    fork: Forks = False
    take_over: Annotated[
        OptionalPath,
        metavar("RUN", "Directory of a live run whose coordinator is lost: continue it in place of that one."),
    ] = None
    standby: Annotated[
        OptionalPath,
        metavar(
            "RUN",
            "Directory of a run with a coordinator elsewhere: stand by, and continue the run, at an address of this "
            "machine, when that coordinator is lost.",
        ),
    ] = None
    host: Annotated[OptionalStr, metavar("ADDRESS")] = None
    """With --standby, the address at which the other machines reach this one, or its network interface; by default that
    of the route to the coordinator."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(CoordinatorArguments, arguments, command="coordinator")
    if given.take_over is not None:
        if flags or given.config is not None or given.resume is not None:
            raise ConfigError(f"--take-over {given.take_over}: the run goes on as it is; leave out all other arguments")
        lost = lost_run(given.take_over)
        from chameleon_ft.launch import take_over

        return take_over(lost.own(lost.config()), run=lost)
    if given.standby is not None:
        if flags or given.config is not None or given.resume is not None:
            raise ConfigError(f"--standby {given.standby}: the run goes on as it is; leave out all but --host")
        JoinArguments(run=given.standby).find_coordinator()
        directory = RunDirectory.open(given.standby)
        from chameleon_ft.launch import stand_by

        return stand_by(directory.own(directory.config()), run=directory, host=given.host)
    if given.host is not None:
        raise ConfigError("--host: is for --standby; of this coordinator, set --control.host")
    prepared = prepare_run(flags, file=given.config, resume=given.resume, fork=given.fork)
    from chameleon_ft.launch import coordinate

    return prepared.start(coordinate)
