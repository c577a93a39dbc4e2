"""`chameleon supervise`: start and watch the workers of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from chameleon_ft.cli._flags import parse_arguments
from chameleon_ft.cli._joining import Coordinator, Token, required_token
from chameleon_ft.control.address import split_address
from chameleon_ft.errors import ConfigError

__all__ = ["main"]


@dataclass(frozen=True)
class SuperviseArguments:
    """Start this machine's workers of a run whose coordinator is elsewhere, and watch them until the run ends."""

    coordinator: Coordinator
    workers: Annotated[int, tyro.conf.arg(help="Worker processes to start here, one for each accelerator.")]
    token: Token = None
    host: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="ADDRESS",
            help="Address at which the other machines reach this one; by default the one that faces the coordinator.",
            help_behavior_hint="",
        ),
    ] = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(SuperviseArguments, arguments, command="supervise")
    if given.workers < 1:
        raise ConfigError(f"--workers {given.workers}: should be 1 or more")
    split_address(given.coordinator)  # says what is wrong with it
    token = required_token(given.token)
    from chameleon_ft.launch import supervise

    return supervise(coordinator=given.coordinator, token=token, workers=given.workers, host=given.host)
