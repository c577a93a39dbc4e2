"""The coordinator's end of the control connections."""

from __future__ import annotations

import hmac
import http
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from websockets.asyncio.server import Server, ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from chameleon_ft.control.wire.address import bearer, join_address
from chameleon_ft.control.wire.messages import Departure, Message, Refused, decode, encode
from chameleon_ft.errors import ControlError

__all__ = ["Handler", "Peer", "control_server", "listening_address"]

_PING_TIMEOUT_CODE = 1011


class Peer:
    """One connection: a rank, an agent or a command."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    @property
    def address(self) -> str:
        host, port, *_ = self._connection.remote_address
        return join_address(host, port)

    def send(self, message: Message) -> None:
        """Hand a message to the network without waiting; to a connection that is closing it goes nowhere."""
        broadcast([self._connection], encode(message))

    def drop(self) -> None:
        """Close the connection without the courtesies, for a peer that may not answer."""
        self._connection.transport.abort()


class Handler(Protocol):
    """What the server calls, always from the event loop's thread."""

    def message(self, peer: Peer, message: Message) -> None:
        """A peer said something. Raises ControlError if it may not say that; the peer is then dropped."""

    def departed(self, peer: Peer, how: Departure) -> None:
        """A connection has ended."""

    def refused(self, address: str, reason: str) -> None:
        """A connection was turned away, or a peer said something that is not of this protocol."""

    def broken(self, error: Exception) -> None:
        """The handler itself has raised something that it should not."""


class _Connection(ServerConnection):
    """A connection that reports a peer that does not even ask to join, of which the library says nothing."""

    def __init__(self, handler: Handler, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._handler = handler

    async def handshake(self, *arguments: Any, **named: Any) -> None:
        address = Peer(self).address  # not known any more once it is gone
        await super().handshake(*arguments, **named)
        if self.request is None:
            why = self.protocol.handshake_exc or "it left without a word"
            self._handler.refused(address, f"does not speak this protocol: {why}")


@dataclass(frozen=True, slots=True)
class _Server:
    handler: Handler
    token: str

    async def connected(self, connection: ServerConnection) -> None:
        peer = Peer(connection)
        how: Departure = "connection"
        with self._mistakes_reported():
            how = await self._listen(connection, peer)
        with self._mistakes_reported():
            self.handler.departed(peer, how)

    @contextmanager
    def _mistakes_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001
            # A mistake of ours. Left to the library it would end this connection without any report.
            self.handler.broken(error)

    async def _listen(self, connection: ServerConnection, peer: Peer) -> Departure:
        """Pass on what a peer says until its connection ends; return how it did."""
        try:
            async for text in connection:
                self.handler.message(peer, decode(text))
        except ControlError as error:
            self.handler.refused(peer.address, str(error))
            peer.send(Refused(reason=str(error)))
        except ConnectionClosed as closed:
            if closed.sent is not None and closed.sent.code == _PING_TIMEOUT_CODE:
                return "heartbeat"
        return "connection"

    def authorize(self, connection: ServerConnection, request: Request) -> Response | None:
        given = "".join(request.headers.get_all("Authorization"))  # a second one spoils it
        if hmac.compare_digest(given.encode(), bearer(self.token)["Authorization"].encode()):
            return None
        host, port, *_ = connection.remote_address
        self.handler.refused(join_address(host, port), "wrong join token")
        return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong join token\n")


def control_server(
    handler: Handler, *, host: str, port: int, token: str, heartbeat_s: float
) -> AbstractAsyncContextManager[Server]:
    """Listen on host:port for peers that know `token`. A peer silent for `heartbeat_s` is departed."""
    server = _Server(handler, token)
    # One after the other when a peer falls silent: up to the next ping, for its answer, and for the peer to take leave.
    return serve(
        server.connected,
        host,
        port,
        process_request=server.authorize,
        ping_interval=heartbeat_s / 4,
        ping_timeout=heartbeat_s / 2,
        close_timeout=heartbeat_s / 4,
        compression=None,
        max_size=None,
        create_connection=cast("type[ServerConnection]", partial(_Connection, handler)),
    )


def listening_address(server: Server, host: str) -> str:
    """Return host:port of a server that is listening."""
    return join_address(host, next(iter(server.sockets)).getsockname()[1])
