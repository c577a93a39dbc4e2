"""Commands in processes that are forked, so that a start takes milliseconds.

A run starts up to five interpreters that load torch or the solvers, which takes seconds each. Here one process for all
tests of this one has loaded them, and each command is forked from it, as is each fork server from its command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from chameleon_ft.host.fork_server import ForkServer
from chameleon_ft.launch.processes import SIGNALS


@cache
def _server() -> ForkServer:
    return ForkServer("tests.forked_command", SIGNALS)


class ForkedCommand:
    """A `chameleon` command that leads a session of its own, with what `subprocess.Popen` has of it.

    It is a child of this process. Its input is empty, and its output and errors can be read from `stdout`. It runs in
    this network namespace, or that of this process.
    """

    def __init__(self, arguments: Sequence[str], *, environ: Mapping[str, str], network: str | None = None) -> None:
        read, written = os.pipe()
        begun, begins = os.pipe()
        forking = _server().fork(
            "tests.forked_command:run_command",
            written,
            begins,
            arguments=list(arguments),
            environ=dict(environ),
            directory=Path.cwd(),
            network=network,
        )
        try:
            self._process = asyncio.run(forking)
        finally:
            os.close(written)
            os.close(begins)
        os.read(begun, 1)  # ends once it leads its session
        os.close(begun)
        self.pid = self._process.pid
        self.stdout = open(read, encoding="utf-8")  # noqa: PTH123, SIM115 - closed by its reader
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        with self._reaping:
            if self.returncode is None and self._has_ended(os.WNOHANG):
                self.returncode = asyncio.run(self._process.wait()) or 0
            return self.returncode

    def wait(self) -> int:
        """Return its exit code, once it has ended."""
        while (code := self.poll()) is None:
            self._has_ended()
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            self._process.send_signal(number)

    def _has_ended(self, options: int = 0) -> bool:
        """Wait for its end, unless told not to by WNOHANG; another thread may reap it meanwhile."""
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options) is not None
        return True
