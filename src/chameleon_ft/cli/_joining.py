"""What the commands that join a coordinator have in common: how they are told where it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional, Protocol

from chameleon_ft.cli._flags import optional_argument
from chameleon_ft.control.wire.address import split_address
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["Coordinator", "JoinArguments", "Run", "Token", "Way", "way_to_coordinator"]

_TOKEN_VARIABLE = "CHAMELEON_TOKEN"

# Optional, for tyro knows that form without loading a type checker, which takes a tenth of a second.
Run = Annotated[
    Optional[Path],  # noqa: UP045
    optional_argument("RUN", "Directory of the run, where this machine can read it: it says where the coordinator is."),
]
Coordinator = Annotated[
    Optional[str],  # noqa: UP045
    optional_argument("HOST:PORT", "Address that the coordinator printed, in place of --run."),
]
Token = Annotated[
    Optional[str],  # noqa: UP045
    optional_argument(
        "TOKEN",
        "Join token, which the coordinator prints on a terminal and keeps in the run's control.json; better in the "
        f"environment, as {_TOKEN_VARIABLE}, where other users of the machine do not see it.",
    ),
]


class JoinArguments(Protocol):
    """The arguments that say where the coordinator is."""

    @property
    def run(self) -> Path | None: ...
    @property
    def coordinator(self) -> str | None: ...
    @property
    def token(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to reach a coordinator."""

    address: str
    """host:port"""
    token: str


def way_to_coordinator(given: JoinArguments) -> Way:
    """Return how to reach the coordinator that the arguments, or the environment, name.

    Raises ConfigError where they name none or two, the run is not live, the address is malformed or a token is missing.
    """
    if (given.run is None) == (given.coordinator is None):
        raise ConfigError("give either --run RUN or --coordinator HOST:PORT, so that the coordinator can be found")
    if given.run is not None:
        control = RunDirectory.open(given.run).read_control()
        return Way(address=control.address, token=control.token)
    assert given.coordinator is not None
    split_address(given.coordinator)  # says what is wrong with it
    token = given.token or os.environ.get(_TOKEN_VARIABLE)
    if not token:
        raise ConfigError(
            f"a join token is needed: set {_TOKEN_VARIABLE} or give --token; it is in the run's control.json"
        )
    return Way(address=given.coordinator, token=token)
