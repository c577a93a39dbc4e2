"""`chameleon agent`: start and watch the workers of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from chameleon_ft.cli.arguments import OptionalStr, Switch, metavar, parse_arguments
from chameleon_ft.cli.joining import JoinArguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class AgentArguments(JoinArguments):
    """Start this machine's workers of a run whose coordinator is elsewhere, and watch them until the run ends.

    Give --run, or --coordinator with its token. SIGTERM drains the workers: the run continues without them, and then
    the agent ends; if no worker would be left, the run ends with a checkpoint. A second SIGTERM, or Ctrl-C, ends them
    at once.
    """

    workers: int
    """Worker processes to start here, one for each accelerator."""
    standby: Switch = False
    """Have a coordinator stand by on this machine, too, and continue the run when the one that leads is lost."""
    host: Annotated[OptionalStr, metavar("ADDRESS")] = None
    """Address at which the other machines reach this one, or its network interface; by default that of the route to the
    coordinator."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(AgentArguments, arguments, command="agent")
    if given.workers < 1:
        raise ConfigError(f"--workers {given.workers}: should be 1 or more")
    if given.standby and given.run is None:
        raise ConfigError("--standby: reads the journal of the run, so it needs --run RUN in place of --coordinator")
    address, token, tls = given.find_coordinator()
    from chameleon_ft.launch import run_agent

    return run_agent(
        coordinator=address,
        token=token,
        tls=tls,
        workers=given.workers,
        host=given.host,
        run=None if given.run is None else RunDirectory.open(given.run),
        stands_by=given.standby,
    )
