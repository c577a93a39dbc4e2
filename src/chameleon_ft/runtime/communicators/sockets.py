"""Ends the TCP connections of a communication library from outside it.

On torch 2.13, neither `abort` nor `shutdown` of a gloo process group wakes a thread that waits in it; shutting down
its sockets does, within milliseconds. The library does not expose its sockets, so this file finds them by what appears
in /proc/self/fd while it connects, and by the addresses that its members have published.

It also asks the kernel whether the other ends still acknowledge anything: a network may drop all packets between two
hosts that both reach the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

_DESCRIPTORS = Path("/proc/self/fd")
ADDRESS_BYTES: Final = 256  # at the beginning of a value that gloo publishes, which have the address
_KEEPALIVE_S: Final = 2  # an idle connection is probed after this
_CONNECTIONS_PER_S: Final = 200  # that are probed; with more, each is probed less often
_MOST_PROBES: Final = 127  # as many as the kernel allows: the coordinator decides when a connection is given up
_SYN_SENT: Final = "02"  # in /proc/net/tcp
_UNANSWERED: Final = 3  # attempts to connect, seconds apart, after which one counts as silent
_LAST_ACK_RECV: Final = 56  # place of that field of `struct tcp_info`, in milliseconds ago


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
        self._probed_s = _KEEPALIVE_S  # after so long without data

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
            self._probed_s = max(_KEEPALIVE_S, len(self._settled) // _CONNECTIONS_PER_S)
            for connection in self._settled:
                _keep_alive(connection, self._probed_s)

    def shut_down(self) -> None:
        """End the tracked connections. Called from any thread, also before `settle`."""
        with self._lock:
            for connection in self._connections():
                with contextlib.suppress(OSError):  # not connected yet, or not any more
                    connection.shutdown(socket.SHUT_RDWR)

    def silences(self) -> list[tuple[bytes, float]]:
        """Return the other end of each settled connection, and for how many seconds that has not answered."""
        with self._lock:
            return [
                (end, _unanswered_s(each) - self._probed_s) for each in self._settled for _, end in _both_ends(each)
            ]

    def ends(self) -> list[tuple[bytes, bytes]]:
        """Return the own and the other end of each connection."""
        with self._lock:
            return [both for connection in self._connections() for both in _both_ends(connection)]

    def unanswered(self) -> list[bytes]:
        """Return the other ends of the connections that this process tries to make, and that are not answered."""
        own = {inode for _, inode in _open_sockets()}
        return [end for end, attempts, inode in _connecting() if attempts >= _UNANSWERED and inode in own]

    def close(self) -> None:
        """End the tracked connections and forget them."""
        self.shut_down()
        with self._lock:
            for connection in self._settled:
                connection.close()
            self._settled = []
            self._before = self._published = None

    def _connections(self) -> Iterator[socket.socket]:
        yield from self._settled
        for connection in self._new_connections():
            with connection:
                yield connection

    def _new_connections(self) -> Iterator[socket.socket]:
        if self._before is None:
            return
        known = None
        if self._published is not None:
            known = b"".join(value[:ADDRESS_BYTES] for value in self._published())
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


def _keep_alive(connection: socket.socket, every_s: int) -> None:
    """Have the kernel probe a connection while it is idle, so that it knows whether its packets arrive."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _both_ends(connection: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Yield the own and the other end, unless it has ended."""
    own, *other = _ends_of(connection)
    yield from ((own, each) for each in other)


def _unanswered_s(connection: socket.socket) -> float:
    """Return the seconds since the other end has acknowledged anything."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_RECV + 4)
    return int.from_bytes(info[_LAST_ACK_RECV:], sys.byteorder) / 1e3


def _connecting() -> Iterator[tuple[bytes, int, int]]:
    """Yield the other end, the repeated attempts and the inode of each connection that is not answered yet."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, _, end, state, _, _, attempts, _, _, inode, *_ = line.split()
                if state == _SYN_SENT:
                    address, port = map(bytes.fromhex, end.split(":"))
                    words = struct.unpack(f">{len(address) // 4}I", address)  # each as the processor stores it
                    flow = bytes(4 if table == "tcp6" else 0)
                    yield port + flow + struct.pack(f"={len(words)}I", *words), int(attempts, 16), int(inode)


def _open_sockets() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of every open socket of this process."""
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                yield int(entry.name), int(target[len("socket:[") : -1])
