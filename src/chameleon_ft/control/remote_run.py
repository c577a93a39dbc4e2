"""A live run whose directory this machine cannot read: its records come from its coordinator."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection

from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.connection import blocking_connection
from chameleon_ft.control.wire.messages import ReadRunFile, Refused, RunFilePart
from chameleon_ft.errors import ControlError
from chameleon_ft.observe import RecordLine, RunDirectory
from chameleon_ft.observe.live.report import RunReport
from chameleon_ft.observe.live.watcher import RunWatcher

_ANSWER_TIMEOUT_S: Final = 30.0


@contextmanager
def remote_watcher(address: str, token: str, *, tls: Path | None) -> Iterator[RemoteWatcher]:
    """Yield a watcher of the run of the coordinator at host:port.

    Raises ControlError if the coordinator does not answer, also in the block.
    """
    with _answering(address):
        connection = blocking_connection(address, token, tls=tls)
    with connection, tempfile.TemporaryDirectory(prefix="chameleon-watch-") as folder:
        copy = _RunCopy(RunDirectory(Path(folder)), connection, address)
        copy.add_new("config.toml")
        yield RemoteWatcher(copy)


@contextmanager
def _answering(address: str) -> Iterator[None]:
    """Say that the coordinator does not answer if a message to it or from it fails in the block."""
    try:
        yield
    except (OSError, WebSocketException, EOFError) as error:
        raise ControlError(
            f"the coordinator at {address} does not answer any more ({error}): the run is over, or its coordinator is "
            "lost or has been replaced"
        ) from None


class _RunCopy:
    """A run directory with copies of the files that are needed to report the state of a run."""

    def __init__(self, run: RunDirectory, connection: ClientConnection, address: str) -> None:
        self.run = run
        self.address = address
        self._connection = connection
        run.plans.mkdir(parents=True)

    def add_new(self, name: str) -> None:
        """Copy what has been added to a file. Raises ControlError if it may not be read."""
        path = self.run.path / name
        with path.open("ab") as file:
            while True:
                part = self._answer(ReadRunFile(name=name, offset=file.tell()))
                file.write(part.content.encode())
                if file.tell() >= part.size or not part.content:
                    return

    def _answer(self, request: ReadRunFile) -> RunFilePart:
        with _answering(self.address):
            self._connection.send(encode(request))
            while True:
                match decode(self._connection.recv(timeout=_ANSWER_TIMEOUT_S)):
                    case RunFilePart() as part:
                        return part
                    case Refused(reason=reason):
                        raise ControlError(reason)


class RemoteWatcher(RunWatcher):
    """Watches a run through its coordinator."""

    def __init__(self, copy: _RunCopy) -> None:
        super().__init__(copy.run, clock=time.time)
        self._copy = copy

    def update(self) -> list[RecordLine]:
        """See `RunWatcher`. Raises ControlError if the coordinator does not answer."""
        for file in (self.run.metrics_file, self.run.events_file):
            self._copy.add_new(file.name)
        lines = super().update()
        plans = [fields["file"] for _, fields in lines if fields.get("event") == "plan"]
        if plans:
            self._copy.add_new(plans[-1])
        return lines

    def report(self) -> RunReport:
        """See `RunWatcher`; the run is named by its address."""
        return replace(super().report(), run=f"the run of the coordinator at {self._copy.address}")

    def has_coordinator(self) -> bool:
        """Return True: its coordinator has sent the records."""
        return True
