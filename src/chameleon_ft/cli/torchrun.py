"""Arguments of torchrun that `chameleon agent` accepts, and advice for those that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from chameleon_ft.cli.arguments import OptionalInt, OptionalStr, metavar
from chameleon_ft.cli.joining import JoinArguments
from chameleon_ft.errors import ConfigError

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
class TorchrunArguments(JoinArguments):
    """Arguments that `chameleon agent` shares with torchrun, under the names of both."""

    workers: OptionalInt = None
    """Worker processes to start here, one for each accelerator. Required."""
    nproc_per_node: Annotated[OptionalStr, metavar("INT")] = None
    """torchrun's name for --workers."""
    rdzv_endpoint: Annotated[OptionalStr, metavar("HOST:PORT")] = None
    """torchrun's name for --coordinator."""
    rdzv_backend: Annotated[OptionalStr, metavar("chameleon")] = None
    """No other value is accepted: the workers meet at the coordinator."""
    nnodes: Annotated[OptionalStr, metavar("INT")] = None
    """Machines with which the run begins, checked with --run; leave it out on a machine that is added later."""

    def num_workers(self) -> int:
        """Return the workers of this machine. Raises ConfigError."""
        if self.workers is not None and self.nproc_per_node is not None:
            raise ConfigError("--workers and --nproc-per-node: mean the same; give one of them")
        if self.workers is None and self.nproc_per_node is None:
            raise ConfigError("--workers is missing: give the number of workers of this machine, one per accelerator")
        if self.workers is not None:
            return _at_least_one("--workers", str(self.workers))
        return _at_least_one("--nproc-per-node", self.nproc_per_node or "")

    def num_nodes(self) -> int | None:
        """Return the machines with which the run begins, if they are given. Raises ConfigError."""
        if self.nnodes is None:
            return None
        least, colon, most = self.nnodes.partition(":")
        if colon and most != least:
            raise ConfigError(
                f"--nnodes {self.nnodes}: should be one number. A run begins with the workers of its configuration, "
                "continues as long as its layers are held, and takes in machines that join later: start agents there"
            )
        return _at_least_one("--nnodes", least)

    def endpoint(self) -> str | None:
        """Return the address of the coordinator, if it is given. Raises ConfigError."""
        if self.rdzv_backend not in (None, "chameleon"):
            raise ConfigError(
                f"--rdzv-backend {self.rdzv_backend}: workers meet at the coordinator of the run; leave it out"
            )
        if self.rdzv_endpoint is not None and self.coordinator is not None:
            raise ConfigError("--coordinator and --rdzv-endpoint: mean the same; give one of them")
        return self.coordinator if self.rdzv_endpoint is None else self.rdzv_endpoint


def _at_least_one(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} {text}: should be a whole number, 1 or more")
    return int(text)


def refuse_foreign_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError if an argument is one of torchrun that agents do not follow."""
    for argument in arguments:
        if argument.endswith(".py"):
            raise ConfigError(f"{argument}: {_JOB}")
        flag = argument.partition("=")[0].replace("_", "-")
        if (remedy := _REMEDIES.get(flag)) is not None:
            raise ConfigError(f"{flag}: is an argument of torchrun that agents do not take; {remedy}")
