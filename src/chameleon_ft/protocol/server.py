"""The coordinator's end of the control connections."""

from __future__ import annotations

import asyncio
import hmac
import http
import itertools
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, cast

from websockets.asyncio.server import Server, ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.address import bearer, join_address, tls_context
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.connection import WILL_RETURN, HeardConnection, heartbeat_interval_s, watch_heartbeat
from chameleon_ft.protocol.messages import Message, Refused

DOES_NOT_LEAD: Final = "this coordinator does not lead the run; try the others\n"
_BACKLOG: Final = 4096  # peers that may reconnect at the same moment


class Peer:
    """One connection: a rank, an agent or a command. Each has a number of its own."""

    def __init__(self, connection: ServerConnection, number: int) -> None:
        self.number = number
        self.address = _address_of(connection)  # not known once the connection is gone
        self.is_local = _is_local(connection)  # whether it is on this host
        self._connection = connection

    @property
    def will_return(self) -> bool:
        """Whether it has closed this connection to make another one."""
        return self._connection.close_code == WILL_RETURN

    def send(self, message: Message, encoded: str | bytes = "") -> None:
        """Hand a message to the network without waiting; a closing connection drops it.

        Args:
            encoded: the message as `codec` writes it, if that has been done.
        """
        broadcast([self._connection], encoded or encode(message))

    def drop(self) -> None:
        """Close the connection without a handshake, for a peer that may not answer."""
        self._connection.transport.abort()


class Handler(Protocol):
    """Receives what happens on the connections, always in the thread of the event loop."""

    def message(self, peer: Peer, message: Message) -> None:
        """Handle a message. Raises ControlError if the peer may not send it; the peer is then dropped."""

    def departed(self, peer: Peer) -> None:
        """Handle the end of a connection."""

    def silent(self, peer: Peer, since_s: float) -> None:
        """Handle missing heartbeats: a ping has been unanswered for `since_s` seconds. Called until it is answered."""

    def answered(self) -> None:
        """Handle a sign of life of a peer on another host."""

    def refused(self, address: str, reason: str) -> None:
        """Handle a connection that was turned away, or a peer that does not speak this protocol."""

    def broken(self, error: Exception) -> None:
        """Handle an unexpected error of the handler itself."""


class _Connection(HeardConnection, ServerConnection):
    """A connection that reports a peer without a valid request, which the library does not.

    One that has sent nothing was lost while it connected, or only wanted to know whether the port is open.
    """

    def __init__(self, handler: Handler, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._handler = handler

    async def handshake(self, *arguments: Any, **named: Any) -> None:
        address = _address_of(self)  # unknown once the connection is gone
        await super().handshake(*arguments, **named)
        if self.request is None and math.isfinite(self.heard_at_s):
            why = self.protocol.handshake_exc or "it sent no request"
            self._handler.refused(address, f"does not speak this protocol: {why}")


@dataclass(frozen=True, slots=True)
class _Server:
    handler: Handler
    token: str
    numbers: Iterator[int]
    heartbeat_timeout_s: float
    expected: int  # peers
    leads: Callable[[], bool]

    async def connected(self, connection: ServerConnection) -> None:
        peer = Peer(connection, next(self.numbers))
        heartbeat = asyncio.create_task(self._watch(connection, peer))
        try:
            with self._reporting_errors():
                await self._listen(connection, peer)
        finally:
            heartbeat.cancel()
        with self._reporting_errors():
            self.handler.departed(peer)

    async def _watch(self, connection: ServerConnection, peer: Peer) -> None:
        # These add up when a peer falls silent: time to the next ping, to its answer, and to a second report, by which
        # the peer's agent may have turned out to be silent too.
        assert isinstance(connection, HeardConnection)
        connection.heard = None if peer.is_local else self.handler.answered
        with self._reporting_errors():
            await watch_heartbeat(
                connection,
                every_s=heartbeat_interval_s(self.heartbeat_timeout_s, self.expected),
                timeout_s=self.heartbeat_timeout_s / 2,
                silent=partial(self.handler.silent, peer),
            )

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001
            # Left to the library, it would end this connection without any report.
            self.handler.broken(error)

    async def _listen(self, connection: ServerConnection, peer: Peer) -> None:
        """Pass on the messages of a peer until its connection ends."""
        try:
            async for text in connection:
                self.handler.message(peer, decode(text))
        except ControlError as error:
            self.handler.refused(peer.address, str(error))
            peer.send(Refused(reason=str(error)))
        except ConnectionClosed:
            pass

    def authorize(self, connection: ServerConnection, request: Request) -> Response | None:
        given = "".join(request.headers.get_all("Authorization"))  # with a second header it matches nothing
        if hmac.compare_digest(given.encode(), bearer(self.token)["Authorization"].encode()):
            if not _is_local(connection):
                self.handler.answered()
            return None if self.leads() else connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, DOES_NOT_LEAD)
        self.handler.refused(_address_of(connection), "wrong join token")
        return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong join token\n")


def control_server(
    handler: Handler,
    *,
    listener: socket.socket,
    token: str,
    heartbeat_timeout_s: float,
    expected: int = 0,
    tls: Path | None = None,
    first_number: int = 1,
    leads: Callable[[], bool] = lambda: True,
) -> AbstractAsyncContextManager[Server]:
    """Listen for peers that know `token`. One silent for `heartbeat_timeout_s` is reported, and stays.

    With thousands of `expected` peers, that takes longer; see `heartbeat_interval_s`.

    None is taken while `leads` returns False; it is to try another coordinator, or again.

    With `tls`, a directory for `tls_context`, peers also need a certificate of its authority. Connections are numbered
    from `first_number` on.
    """
    server = _Server(handler, token, itertools.count(first_number), heartbeat_timeout_s, expected, leads)
    return serve(
        server.connected,
        sock=listener,
        ssl=tls_context(tls, server=True),
        process_request=server.authorize,
        ping_interval=None,
        close_timeout=heartbeat_timeout_s / 4,
        compression=None,
        max_size=None,
        create_connection=cast("type[ServerConnection]", partial(_Connection, handler)),
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host:port; connections wait there for a coordinator to take them."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _is_local(connection: ServerConnection) -> bool:
    own, other = connection.local_address, connection.remote_address  # unknown once the connection is gone
    return own is not None and other is not None and own[0] == other[0]


def _address_of(connection: ServerConnection) -> str:
    if connection.remote_address is None:
        return "a peer that is gone"
    host, port, *_ = connection.remote_address
    return join_address(host, port)
