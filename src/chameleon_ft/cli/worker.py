"""`chameleon worker`: be one worker, started by a cluster's own launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.cli._flags import parse_arguments
from chameleon_ft.cli._joining import Coordinator, Run, Token, way_to_coordinator
from chameleon_ft.errors import ConfigError

__all__ = ["main"]


@dataclass(frozen=True)
class WorkerArguments:
    """Be one worker of a run whose coordinator is elsewhere, started by a cluster's own launcher such as srun.

    The coordinator is found by --run, or by --coordinator with its token.
    RANK, WORLD_SIZE and LOCAL_RANK are read from the environment, as torchrun sets them; CHAMELEON_HOST, if it is set,
    is the address at which the other machines reach this one.
    """

    run: Run = None
    coordinator: Coordinator = None
    token: Token = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(WorkerArguments, arguments, command="worker")
    way = way_to_coordinator(given)
    _check_ranks(os.environ)
    from chameleon_ft.launch import work

    return work(coordinator=way.address, token=way.token, environ=os.environ)


def _check_ranks(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where the launcher's variables are missing, no numbers or out of range."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    wrong = [name for name in names if not environ.get(name, "").isdecimal()]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: should be set to a number in the environment, as torchrun does; "
            "docs/cluster.md shows how to have srun and Kubernetes set it"
        )
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if rank >= world_size:
        raise ConfigError(f"RANK = {rank}: should be lower than WORLD_SIZE = {world_size}")
