"""What the commands that join a coordinator on another machine have in common."""

from __future__ import annotations

import os
from typing import Annotated

import tyro

from chameleon_ft.errors import ConfigError

__all__ = ["TOKEN_VARIABLE", "Coordinator", "Token", "required_token"]

TOKEN_VARIABLE = "CHAMELEON_TOKEN"

Coordinator = Annotated[
    str, tyro.conf.arg(metavar="HOST:PORT", help="Address that the coordinator printed.", help_behavior_hint="")
]
Token = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="TOKEN",
        help=f"Join token that the coordinator printed; better in the environment, as {TOKEN_VARIABLE}, "
        "where other users of the machine do not see it.",
        help_behavior_hint="",
    ),
]


def required_token(token: str | None) -> str:
    """Return `token`, or the environment's. Raises ConfigError where there is none."""
    if found := token or os.environ.get(TOKEN_VARIABLE):
        return found
    raise ConfigError(f"a join token is needed: set {TOKEN_VARIABLE} or give --token; the coordinator printed it")
