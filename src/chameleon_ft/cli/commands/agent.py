"""`chameleon agent`: start and watch the workers of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import tyro
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.session.joining import JoinRequest
from chameleon_ft.storage.files import RunDirectory

_JOB: Final = "the coordinator names the job, not the agents: `chameleon coordinator CONFIG --job FILE.py:FUNCTION`"
_LOGS: Final = "logs are in the folder logs of the run directory; leave it out"
_REMEDIES: Final = {
    "--rdzv-id": "the join token tells which run it is; leave it out",
    "--rdzv-conf": "--wait-s is the time to wait for the coordinator, and the configuration has all other timeouts",
    "--standalone": "use `chameleon train` or `chameleon run`, which start all that a run on one machine needs",
    "--max-restarts": "workers are restarted if the run has recovery.respawn, up to recovery.max_respawns times",
    "--monitor-interval": "an agent notices the end of a worker at once; leave it out",
    "--node-rank": "machines are numbered in the order in which they join; leave it out",
    "--master-addr": "write --rdzv-endpoint HOST:PORT",
    "--master-port": "write --rdzv-endpoint HOST:PORT",
    "--local-addr": "write --host ADDRESS",
    "--log-dir": _LOGS,
    "--redirects": _LOGS,
    "--tee": _LOGS,
    "--local-ranks-filter": _LOGS,
    "-r": _LOGS,
    "-t": _LOGS,
    "--role": "all workers of a run do the same; leave it out",
    "--start-method": "agents fork workers from a process that has loaded torch; leave it out",
    "--module": _JOB,
    "-m": _JOB,
    "--no-python": _JOB,
    "--run-path": _JOB,
}


@dataclass(frozen=True, kw_only=True)
class AgentArguments(JoinRequest):
    """Start this machine's workers of a run whose coordinator is elsewhere, and watch them until the run ends.

    Give --run, or --coordinator with its token. SIGTERM drains the workers: the run continues without them, and then
    the agent ends; if no worker would be left, the run ends with a checkpoint. A second SIGTERM, or Ctrl-C, ends them
    at once. The flags of torchrun for the same things are accepted, too.
    """

    coordinator: Annotated[str | None, "HOST:PORT", tyro.conf.arg(aliases=["--rdzv-endpoint"])] = None
    """Address that the coordinator printed, instead of --run."""
    workers: Annotated[PositiveInt | None, tyro.conf.arg(aliases=["--nproc-per-node"])] = None
    """Worker processes to start here, one for each accelerator. Required."""
    rdzv_backend: Literal["chameleon"] | None = None
    """No other value is accepted: the workers meet at the coordinator."""
    nnodes: Annotated[str | None, "INT"] = None
    """Machines with which the run begins, checked with --run; leave it out on a machine that is added later."""
    standby: bool = False
    """Have a coordinator stand by on this machine, too: it continues the run if the one that leads is lost."""
    host: Annotated[str | None, "ADDRESS"] = None
    """Address of this machine, or its network interface; by default that of the route to the coordinator."""
    drained_exit_code: Annotated[int, Field(ge=0, lt=128)] = 0
    """Exit code once all workers here are drained; give 75 to a scheduler that restarts only failed agents."""

    def num_nodes(self) -> int | None:
        """Return the machines with which the run begins, if they are given. Raises ConfigError."""
        if self.nnodes is None:
            return None
        least, colon, most = self.nnodes.partition(":")
        if not least.isdecimal() or int(least) < 1 or (colon and most != least):
            raise ConfigError(
                f"--nnodes {self.nnodes}: should be one number, 1 or more. A run begins with the workers of its "
                "configuration, continues as long as its layers are held, and takes in machines that join later: start "
                "agents there"
            )
        return int(least)


def refuse_foreign_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError if an argument is one of torchrun that agents do not follow."""
    for argument in arguments:
        if argument.endswith(".py"):
            raise ConfigError(f"{argument}: {_JOB}")
        flag = argument.partition("=")[0].replace("_", "-")
        if (remedy := _REMEDIES.get(flag)) is not None:
            raise ConfigError(f"{flag}: is an argument of torchrun that agents do not take; {remedy}")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    refuse_foreign_arguments(arguments)
    given = parse_arguments(AgentArguments, arguments, command="agent")
    workers, nodes = given.workers, given.num_nodes()
    if workers is None:
        raise ConfigError("--workers is missing: give the number of workers of this machine, one per accelerator")
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
