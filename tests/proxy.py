"""A proxy that passes on connections, and can cut one of them, or pass on nothing, as a network does."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

from chameleon_ft.protocol.address import join_address, split_address


class Proxy:
    """Passes each connection to `address` on to a target, host:port, as long as it is entered."""

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address(*self._listener.getsockname())
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._passes_on = threading.Event()
        self._passes_on.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, number: int) -> None:
        """Reset a connection, at both ends; they are numbered from 0 in the order in which they were made."""
        for end in self._pairs[number]:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def hold(self) -> None:
        """Pass on nothing, on any connection, until `release`."""
        self._passes_on.clear()

    def release(self) -> None:
        """Pass on everything again, also what has come meanwhile."""
        self._passes_on.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()
        self.release()
        for ends in self._pairs:
            for end in ends:
                end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes_on.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
