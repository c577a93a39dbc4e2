"""The coordinator of a live run, as the machines that join it and the commands that watch it find it.

The client is imported lazily, because `--help` must not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from typing_extensions import Doc

from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.events.records import RunStatus
from chameleon_ft.protocol.address import TOKEN_VARIABLE, CoordinatorAccess, split_address
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.run_lock import RunLock

_RETRY_S: Final = 0.1
"""The first pause between two attempts; each that follows is twice as long, up to `_RETRY_MAX_S`."""
_RETRY_MAX_S: Final = 2.0
_OVER_S: Final = 5.0
"""A finished run that is not resumed for this time is over."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A coordinator to join: a run directory, or an address and a token."""

    run: Annotated[Path | None, "RUN"] = None
    """Directory of the run, if this machine can read it: it holds the address of the coordinator and the token."""
    coordinator: Annotated[str | None, "HOST:PORT"] = None
    """Address that the coordinator printed, instead of --run."""
    token: Annotated[
        str | None,
        "TOKEN",
        Doc(
            "Join token, which the coordinator prints on a terminal and keeps in the run's control.json. Prefer the "
            f"environment variable {TOKEN_VARIABLE}, which other users of the machine cannot see."
        ),
    ] = None
    tls: Annotated[Path | None, "DIRECTORY"] = None
    """Directory with ca.pem, cert.pem and key.pem, if the coordinator wants TLS; with --run by default its own."""
    wait_s: NonNegativeFloat = 300.0
    """Seconds to wait for the coordinator, if it does not answer yet."""

    def find_coordinator(self) -> CoordinatorAccess | None:
        """Wait for the coordinator, and return the way to it.

        Returns None, and says so, if all steps of the run are trained and no process resumes it.

        Raises:
            ConfigError: the arguments and the environment name no coordinator or two, the address is malformed or the
                token is missing; or there is no such run, or it is not live, after the wait.
            ControlError: the coordinator rejects the token, or does not answer within the wait.
        """
        from chameleon_ft.launch.live_run import require_coordinator

        if (self.run is None) == (self.coordinator is None):
            raise ConfigError("give either --run RUN or --coordinator HOST:PORT, so that the coordinator can be found")
        if self.run is not None and self.token is not None:
            raise ConfigError(f"--token: for --coordinator; that of --run {self.run} is in its control.json")
        began_s, pause_s, has_said = time.monotonic(), _RETRY_S, False
        while True:
            try:
                found = self._coordinator()
                if not self._may_lead():
                    require_coordinator(found.address, found.token, tls=found.tls)
                return found
            except (ConfigError, ControlError, OSError) as error:
                # The files of a run are written by another machine, and may be those of a coordinator that is gone.
                is_final = self.run is None and isinstance(error, ChameleonError)
                waited_s, status = time.monotonic() - began_s, self._status_of_last_start()
                if status == "finished" and waited_s > min(_OVER_S, self.wait_s - pause_s):
                    print(f"{self.run}: the run is over: all of its steps are done", flush=True)
                    return None
                if is_final or waited_s + pause_s > self.wait_s:
                    if isinstance(error, ChameleonError):
                        raise
                    raise ControlError(
                        f"no coordinator answers at {found.address} within {self.wait_s:g} s: {error}; check that it "
                        "runs, the address and --tls"
                    ) from None
            if not has_said:
                has_said = True
                print(f"waiting up to {self.wait_s:g} s for the coordinator {self._where(status)}", flush=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    def _may_lead(self) -> bool:
        """Return whether this process may continue the run itself, so that it need not wait for a coordinator."""
        return False

    def _where(self, status: RunStatus | None) -> str:
        """Return where the coordinator is expected, and why it is not there yet as far as the files of the run tell."""
        if self.run is None:
            return f"at {self.coordinator}"
        if not self.run.exists():
            return f"of {self.run}, where there is no directory yet"
        if not RunDirectory(self.run).config_file.exists():
            return f"of {self.run}, which is not a run directory yet"
        return f"of {self.run}" if status is None else f"of {self.run}, which is {status}"

    def _status_of_last_start(self) -> RunStatus | None:
        """Return how the run has ended; None if it is live, is being resumed or its coordinator is lost."""
        if self.run is None or RunDirectory(self.run).control_file.exists() or RunLock.is_in(self.run):
            return None
        from chameleon_ft.coordinator.journal import LastEntry

        # The journal may be damaged.
        with contextlib.suppress(ChameleonError):
            last = LastEntry.newest(RunDirectory(self.run))
            return None if last is None else last.status
        return None

    def _coordinator(self) -> CoordinatorAccess:
        """Return the way to the coordinator as it is known now. Raises ConfigError."""
        if self.run is not None:
            run = RunDirectory.open(self.run)
            control, patience_s = run.read_control(), run.config().timeouts.reconnect_s
            found = replace(CoordinatorAccess.of(control), patience_s=patience_s, run=self.run.absolute())
            return found if self.tls is None else replace(found, tls=self.tls)
        address, token = self.coordinator or "", self.token or os.environ.get(TOKEN_VARIABLE)
        # Raises if the address is malformed.
        split_address(address)
        if not token:
            raise ConfigError(
                f"a join token is needed: set {TOKEN_VARIABLE} or give --token; it is in the run's control.json"
            )
        return CoordinatorAccess(address=address, token=token, tls=self.tls)


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """A run to watch: its directory, or the address of its coordinator and a token."""

    run: Path | None = None
    """Run directory."""
    coordinator: Annotated[str | None, "HOST:PORT"] = None
    """Address that the coordinator of a live run printed, instead of RUN, if this machine cannot read that."""
    token: Annotated[
        str | None,
        "TOKEN",
        Doc(
            f"With --coordinator: join token, by default that of {TOKEN_VARIABLE}, which other users of this machine "
            "cannot see."
        ),
    ] = None
    tls: Annotated[Path | None, "DIRECTORY"] = None
    """With --coordinator: ca.pem, cert.pem and key.pem, if the coordinator wants TLS."""

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
        found = JoinRequest(coordinator=self.coordinator, token=self.token, tls=self.tls, wait_s=0).find_coordinator()
        assert found is not None
        from chameleon_ft.launch.live_run import remote_watcher

        with remote_watcher(found.address, found.token, tls=found.tls) as watcher:
            yield watcher


@dataclass(frozen=True, kw_only=True)
class StandbyRequest(JoinRequest):
    """A run whose coordinator another one is to succeed."""

    def _may_lead(self) -> bool:
        """Return whether the coordinator may be lost, and workers still look for another: it has written lately."""
        assert self.run is not None
        run = RunDirectory.open(self.run)
        with contextlib.suppress(FileNotFoundError):
            journals = run.journals()
            written_at = max(file.stat().st_mtime for file in (run.control_file, *journals))
            return bool(journals) and time.time() - written_at < run.config().timeouts.reconnect_s
        return False
