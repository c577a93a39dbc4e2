"""Arguments of the commands that join a coordinator."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chameleon_ft.cli.arguments import OptionalPath, OptionalStr, metavar
from chameleon_ft.control.wire.address import split_address
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["TOKEN_VARIABLE", "JoinArguments"]

TOKEN_VARIABLE = "CHAMELEON_TOKEN"


@dataclass(frozen=True, kw_only=True)
class JoinArguments:
    """The arguments that name the coordinator."""

    run: Annotated[OptionalPath, metavar("RUN")] = None
    """Directory of the run, if this machine can read it: it holds the address of the coordinator and the token."""
    coordinator: Annotated[OptionalStr, metavar("HOST:PORT")] = None
    """Address that the coordinator printed, instead of --run."""
    token: Annotated[
        OptionalStr,
        metavar(
            "TOKEN",
            "Join token, which the coordinator prints on a terminal and keeps in the run's control.json. Prefer the "
            f"environment variable {TOKEN_VARIABLE}, which other users of the machine cannot see.",
        ),
    ] = None

    tls: Annotated[
        OptionalPath,
        metavar(
            "DIRECTORY",
            "Directory with ca.pem, cert.pem and key.pem, if the coordinator wants TLS; with --run "
            "by default the one that the coordinator uses.",
        ),
    ] = None

    def find_coordinator(self) -> tuple[str, str, Path | None]:
        """Return the address, host:port, the token and the TLS directory of the coordinator.

        Raises ConfigError if the arguments and the environment name none or two, the run is not live, the address is
        malformed or the token is missing.
        """
        if (self.run is None) == (self.coordinator is None):
            raise ConfigError("give either --run RUN or --coordinator HOST:PORT, so that the coordinator can be found")
        if self.run is not None:
            control = RunDirectory.open(self.run).read_control()
            return control.address, control.token, self.tls or control.tls
        assert self.coordinator is not None
        split_address(self.coordinator)  # raises if it is malformed
        token = self.token or os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise ConfigError(
                f"a join token is needed: set {TOKEN_VARIABLE} or give --token; it is in the run's control.json"
            )
        return self.coordinator, token, self.tls
