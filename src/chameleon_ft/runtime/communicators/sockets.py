"""Ends the TCP connections of a communication library from outside it.

On torch 2.13, neither `abort` nor `shutdown` of a gloo process group wakes a thread that waits in it; shutting down
its sockets does, within milliseconds. The library does not expose its sockets, so this file finds them by what appears
in /proc/self/fd while it connects, and by the addresses that its members have published.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = ["SocketTracker"]

_DESCRIPTORS = Path("/proc/self/fd")
_ADDRESS_BYTES = 256  # at the beginning of a value that gloo publishes, which have the address


class SocketTracker:
    """The TCP connections between the members of a group that this process opens between `start` and `settle`.

    They are identified by inode, since a file descriptor number may be reused at once. Listening sockets are left
    alone: gloo ends the process when its listening socket fails. So are connections that the job makes, for example to
    where it reads its data, and one to another coordinator, once `narrow` was called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: Callable[[], Sequence[bytes]] | None = None
        self._before: set[int] | None = None
        self._settled: list[socket.socket] = []

    def start(self) -> None:
        """Track every connection from now on."""
        with self._lock:
            self._before = {inode for _, inode in _open_sockets()}

    def narrow(self, published: Callable[[], Sequence[bytes]]) -> None:
        """Track only connections of which one end is an address at which a member listens.

        Args:
            published: returns what the members have published so far, with these addresses.
        """
        self._published = published

    def settle(self) -> None:
        """Track no later connection."""
        with self._lock:
            # A duplicate names the connection itself, whatever becomes of the library's descriptor.
            self._settled = list(self._new_connections())
            self._before = None

    def shut_down(self) -> None:
        """End the tracked connections. Called from any thread, also before `settle`."""
        with self._lock:
            for connection in self._settled:
                _shut_down(connection)
            for connection in self._new_connections():
                with connection:
                    _shut_down(connection)

    def close(self) -> None:
        """End the tracked connections and forget them."""
        self.shut_down()
        with self._lock:
            for connection in self._settled:
                connection.close()
            self._settled = []
            self._before = self._published = None

    def _new_connections(self) -> Iterator[socket.socket]:
        if self._before is None:
            return
        known = None
        if self._published is not None:
            known = b"".join(value[:_ADDRESS_BYTES] for value in self._published())
        for descriptor, inode in _open_sockets():
            if inode in self._before:
                continue
            try:
                connection = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue  # closed since it was listed
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
                and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and (known is None or any(end in known for end in _ends_of(connection)))
            ):
                yield connection
            else:
                connection.close()


def _ends_of(connection: socket.socket) -> Iterator[bytes]:
    """Yield the port and the address of both ends, as `struct sockaddr_in` and `sockaddr_in6` have them."""
    for end in (connection.getsockname, connection.getpeername):
        with contextlib.suppress(OSError):  # not connected yet, or not any more
            host, port, *others = end()
            flow = struct.pack(">I", others[0]) if others else b""
            yield struct.pack(">H", port) + flow + socket.inet_pton(connection.family, host.partition("%")[0])


def _open_sockets() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of every open socket of this process."""
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                yield int(entry.name), int(target[len("socket:[") : -1])


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected yet, or not any more
        connection.shutdown(socket.SHUT_RDWR)
