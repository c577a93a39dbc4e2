"""`chameleon agent`: start and watch the workers of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from chameleon_ft.cli.arguments import OptionalStr, Switch, metavar, parse_arguments
from chameleon_ft.cli.joining import TorchrunArguments, refuse_foreign_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True, kw_only=True)
class AgentArguments(TorchrunArguments):
    """Start this machine's workers of a run whose coordinator is elsewhere, and watch them until the run ends.

    Give --run, or --coordinator with its token. SIGTERM drains the workers: the run continues without them, and then
    the agent ends; if no worker would be left, the run ends with a checkpoint. A second SIGTERM, or Ctrl-C, ends them
    at once.
    """

    standby: Switch = False
    """Have a coordinator stand by on this machine, too: it continues the run if the one that leads is lost."""
    host: Annotated[OptionalStr, metavar("ADDRESS")] = None
    """Address of this machine, or its network interface; by default that of the route to the coordinator."""
    drained_exit_code: int = 0
    """Exit code once all workers here are drained; give 75 to a scheduler that restarts only failed agents."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    refuse_foreign_arguments(arguments)
    given = parse_arguments(AgentArguments, arguments, command="agent")
    workers, nodes = given.num_workers(), given.num_nodes()
    given = replace(given, coordinator=given.endpoint())
    if not 0 <= given.drained_exit_code < 128:
        raise ConfigError(f"--drained-exit-code {given.drained_exit_code}: should be from 0 to 127")
    if given.standby and given.run is None:
        raise ConfigError("--standby: reads the journal of the run, so it needs --run RUN in place of --coordinator")
    if (access := given.find_coordinator()) is None:
        return 0
    run = None if given.run is None else RunDirectory.open(given.run)
    if run is not None and nodes is not None and (begins_with := run.config().workers) != nodes * workers:
        raise ConfigError(
            f"--nnodes {nodes}: the run begins with {begins_with} workers, and {nodes} machines with {workers} each "
            f"have {nodes * workers}; change one of these numbers, or leave out --nnodes"
        )
    from chameleon_ft.launch.agent import run_agent

    return run_agent(
        access,
        workers=workers,
        host=given.host,
        run=run,
        stands_by=given.standby,
        drained_exit_code=given.drained_exit_code,
    )
