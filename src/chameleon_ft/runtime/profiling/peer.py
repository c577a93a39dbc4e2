"""The connection between two hosts that measure the link between them: both ends know a token, and prove it.

Both ends draw a number; the keys of the two directions follow from these and the token. Every message carries its
HMAC with its place in the order, so that none can be made up, left out, repeated or answered by another. Nothing that
is not authenticated is parsed.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any, Final

from torch._C._distributed_c10d import Store

from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.messages import Message, Publish
from chameleon_ft.errors import ControlError
from chameleon_ft.runtime.communicators.store import GenerationStore

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_MOST_BYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct("!I")
_GENERATION: Final = 1


@dataclass(slots=True)
class PeerConnection:
    """An authenticated connection. It can be handed to another process, which continues where this one has stopped.

    Attributes:
        key: a secret of this connection, for others that the two ends make.
    """

    connection: socket.socket
    key: bytes
    _send_key: bytes
    _receive_key: bytes
    _sent: int = 0
    _received: int = 0

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Leave out the socket, whose descriptor is handed over beside the pickle."""
        return None, {name: getattr(self, name) for name in self.__slots__ if name != "connection"}

    @classmethod
    def opened(cls, connection: socket.socket, token: str, *, answers: bool) -> PeerConnection:
        """Exchange numbers with the other end. `answers`: whether this is the end that was connected to."""
        own = os.urandom(_NONCE_BYTES)
        connection.sendall(own)
        other = _exactly(connection, _NONCE_BYTES)
        numbers = other + own if answers else own + other
        secret = hmac.digest(token.encode(), b"chameleon profile" + numbers, "sha256")
        keys = [hmac.digest(secret, name, "sha256") for name in (b"to answer", b"answer", b"other connections")]
        send_key, receive_key = (keys[1], keys[0]) if answers else (keys[0], keys[1])
        return cls(connection, keys[2], send_key, receive_key)

    def send(self, text: str) -> None:
        """Send a text. Raises OSError if the connection is lost."""
        body = text.encode()
        mac = hmac.digest(self._send_key, _LENGTH.pack(self._sent) + body, "sha256")
        self._sent += 1
        self.connection.sendall(_LENGTH.pack(len(body)) + mac + body)

    def receive(self) -> str:
        """Wait for the next text.

        Raises:
            ControlError: the other end does not know the token.
            OSError: the connection is lost.
        """
        (length,) = _LENGTH.unpack(_exactly(self.connection, _LENGTH.size))
        if length > _MOST_BYTES:
            raise ControlError("the other end does not speak this protocol; is it of the same version?")
        mac, body = _exactly(self.connection, _MAC_BYTES), _exactly(self.connection, length)
        expected = hmac.digest(self._receive_key, _LENGTH.pack(self._received) + body, "sha256")
        if not hmac.compare_digest(mac, expected):
            raise ControlError("the other end has another token; set CHAMELEON_TOKEN to the same on both hosts")
        self._received += 1
        return body.decode()


class PeerStore:
    """The rendezvous store of two processes, one at each end of a connection: what one sets, the other one gets."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection
        self._store = GenerationStore(_GENERATION, self._requested)
        threading.Thread(target=self._receive, name="peer-store", daemon=True).start()

    def open(self, *, timeout_s: float) -> Store:
        """Return the store, whose waits end after `timeout_s`; see `Rendezvous.open_store`."""
        return self._store.opened(timeout_s=timeout_s)

    def _requested(self, message: Message) -> None:
        """Carry out a request of this end; what is looked up comes by itself."""
        if isinstance(message, Publish):
            self._connection.send(encode(message))
            self._store.take_in([(message.key, message.value)])

    def _receive(self) -> None:
        try:
            while True:
                message = decode(self._connection.receive())
                if isinstance(message, Publish):
                    self._store.take_in([(message.key, message.value)])
        except (ControlError, OSError):
            self._store.end()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes. Raises OSError if the connection ends before."""
    parts = bytearray()
    while len(parts) < count:
        if not (part := connection.recv(count - len(parts))):
            raise ConnectionResetError("the other end has closed the connection")
        parts += part
    return bytes(parts)
