"""`chameleon worker`: run one worker, started by a cluster's own launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.session.joining import JoinRequest


@dataclass(frozen=True, kw_only=True)
class WorkerArguments(JoinRequest):
    """Run one worker of a run whose coordinator is elsewhere, started by a cluster's own launcher such as srun.

    Give --run, or --coordinator with its token. RANK, WORLD_SIZE and LOCAL_RANK are read from the environment, as
    torchrun sets them. CHAMELEON_HOST, if set, is the address at which the other machines reach this one. SIGTERM
    drains the worker: the run continues without it, and then it ends. A second SIGTERM ends it at once.
    """


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(WorkerArguments, arguments, command="worker")
    environ = os.environ
    wrong = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if not environ.get(name, "").isdecimal()]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: should be set to a number in the environment, as torchrun does; "
            "docs/slurm.md shows how to have srun set it"
        )
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if rank >= world_size:
        raise ConfigError(f"RANK = {rank}: should be lower than WORLD_SIZE = {world_size}")
    if (access := given.find_coordinator()) is None:
        return 0
    from chameleon_ft.launch.agent import work

    return work(access, environ=environ)
