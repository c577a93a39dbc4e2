"""`chameleon agent`: start and watch the workers of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Optional

import tyro

from chameleon_ft.cli._flags import optional_argument, parse_arguments
from chameleon_ft.cli._joining import Coordinator, Run, Token, way_to_coordinator
from chameleon_ft.errors import ConfigError

__all__ = ["main"]


@dataclass(frozen=True)
class AgentArguments:
    """Start this machine's workers of a run whose coordinator is elsewhere, and watch them until the run ends.

    The coordinator is found by --run, or by --coordinator with its token.
    """

    workers: Annotated[int, tyro.conf.arg(help="Worker processes to start here, one for each accelerator.")]
    run: Run = None
    coordinator: Coordinator = None
    token: Token = None
    host: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument(
            "ADDRESS", "Address at which the other machines reach this one; by default the one facing the coordinator."
        ),
    ] = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(AgentArguments, arguments, command="agent")
    if given.workers < 1:
        raise ConfigError(f"--workers {given.workers}: should be 1 or more")
    way = way_to_coordinator(given)
    from chameleon_ft.launch import run_agent

    return run_agent(coordinator=way.address, token=way.token, workers=given.workers, host=given.host)
