"""Arguments of the commands that show a run: its directory, or its coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from chameleon_ft.cli.arguments import OptionalPath, OptionalStr, metavar
from chameleon_ft.cli.joining import JoinArguments
from chameleon_ft.control.wire.address import TOKEN_VARIABLE
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory
from chameleon_ft.observe.live.watcher import RunWatcher


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """The arguments that name the run."""

    run: Annotated[Optional[Path], tyro.conf.Positional, metavar("[RUN]")] = None  # noqa: UP045
    """Run directory."""
    coordinator: Annotated[OptionalStr, metavar("HOST:PORT")] = None
    """Address that the coordinator of a live run printed, instead of RUN, if this machine cannot read that."""
    token: Annotated[
        OptionalStr,
        metavar(
            "TOKEN",
            f"With --coordinator: join token, by default that of {TOKEN_VARIABLE}, which other users of this machine "
            "cannot see.",
        ),
    ] = None
    tls: Annotated[
        OptionalPath,
        metavar("DIRECTORY", "With --coordinator: ca.pem, cert.pem and key.pem, if the coordinator wants TLS."),
    ] = None

    @contextmanager
    def watcher(self) -> Iterator[RunWatcher]:
        """Yield a watcher of the run.

        Raises:
            ConfigError: the arguments name no run or two, do not belong together, or there is no such run.
            ControlError: the coordinator does not answer, also in the block, or rejects the token.
        """
        if (self.run is None) == (self.coordinator is None):
            raise ConfigError("give either RUN, the run directory, or --coordinator HOST:PORT of a live run")
        if self.run is not None:
            if given := [flag for flag, value in (("--token", self.token), ("--tls", self.tls)) if value is not None]:
                raise ConfigError(
                    f"{' and '.join(given)}: for --coordinator; the files of RUN are read without, so leave it out"
                )
            yield RunWatcher(RunDirectory.open(self.run))
            return
        found = JoinArguments(coordinator=self.coordinator, token=self.token, tls=self.tls, wait_s=0).find_coordinator()
        assert found is not None
        from chameleon_ft.control.remote_run import remote_watcher

        with remote_watcher(found.address, found.token, tls=found.tls) as watcher:
            yield watcher
