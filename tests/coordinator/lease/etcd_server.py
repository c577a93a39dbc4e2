"""An etcd server of a test: the command of the system's package, on free ports of the loopback."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from chameleon_ft.host.fork_server import end_with

_OLDEST: Final = (3, 4)  # with the JSON interface under /v3


def _etcd() -> str | None:
    """Return the command, if there is one that is new enough."""
    if (etcd := shutil.which("etcd")) is None:
        return None
    version = subprocess.run([etcd, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"etcd Version: (\d+)\.(\d+)", version)
    return etcd if found and tuple(map(int, found.groups())) >= _OLDEST else None


ETCD: Final = _etcd()


class EtcdServer:
    """One member that is its own cluster.

    Attributes:
        address: its value of `control.lease`.
    """

    def __init__(self, directory: Path, *, tls: Sequence[str] = ()) -> None:
        directory.mkdir(parents=True)
        self.log = directory / "etcd.log"
        client, peer = _free_ports()
        client_url, peer_url = f"{'https' if tls else 'http'}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        command = [str(ETCD), "--data-dir", str(directory / "data"), "--initial-cluster", f"default={peer_url}"]
        command += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
        command += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *tls], stdout=log, stderr=log, preexec_fn=partial(end_with, os.getpid())
            )
        self.address = f"{'etcds' if tls else 'etcd'}://127.0.0.1:{client}"

    def is_alive(self) -> bool:
        """Return whether its process lives."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until it can answer, which it says in its log."""
        deadline = time.monotonic() + 60
        while "ready to serve client requests" not in self.log.read_text(encoding="utf-8"):
            if not self.is_alive() or time.monotonic() > deadline:
                raise AssertionError(f"etcd has not begun to serve:\n{self.log.read_text(encoding='utf-8')}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop its process, and wait until every thread of it stands: it accepts connections and answers no request."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(30)


@contextmanager
def etcd_server(directory: Path, *, tls: Sequence[str] = ()) -> Iterator[EtcdServer]:
    """Start a server, and end it with the context. Another process may take a free port first: then try again."""
    for attempt in range(3):
        server = EtcdServer(directory / f"etcd-{attempt}", tls=tls)
        try:
            try:
                server.wait_until_ready()
            except AssertionError:
                if attempt == 2 or "address already in use" not in server.log.read_text(encoding="utf-8"):
                    raise
                continue
            yield server
            return
        finally:
            server.end()


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return [each.getsockname()[1] for each in sockets]
