"""The client's end of the control connections, which outlasts the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from chameleon_ft.control.wire.address import bearer, websocket_url
from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.heartbeat import watch_heartbeat
from chameleon_ft.control.wire.messages import Acknowledged, Message
from chameleon_ft.control.wire.tls import tls_context

__all__ = ["ControlConnection", "control_connection"]

# The coordinator's own pings find a lost peer fast. These only end a peer that the network has cut off, which the
# coordinator has given up long before.
_PING_EVERY_S: Final = 10.0
_PING_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.05  # wait before the first attempt to reconnect; twice as long before each that follows
_RETRY_MAX_S: Final = 1.0


class _Connection(ClientConnection):
    """A connection of a process that may have been held up: a pong counts, however late it is seen."""

    async def keepalive(self) -> None:
        await watch_heartbeat(
            self, every_s=_PING_EVERY_S, timeout_s=_PING_TIMEOUT_S, silent=lambda _: self.transport.abort()
        )


def control_connection(coordinator: str, token: str, *, tls: Path | None = None) -> connect:
    """Return the connection to the coordinator at host:port, to be awaited or entered.

    It closes by itself after twenty seconds without an answer of the coordinator.

    Args:
        tls: directory for `tls_context`; None: no TLS.

    Raises:
        ConfigError: the directory cannot be used.
    """
    return connect(
        websocket_url(coordinator, tls=tls is not None),
        ssl=tls_context(tls),
        additional_headers=bearer(token),
        ping_interval=_PING_EVERY_S,  # otherwise `keepalive` is not called
        close_timeout=_CLOSE_TIMEOUT_S,
        create_connection=_Connection,
        compression=None,
        max_size=None,
        proxy=None,
    )


class ControlConnection:
    """A connection to the coordinator that is made again, with one that replaces it, when it is lost.

    Messages are kept until they are acknowledged, and sent again after a reconnection. All methods are called in the
    thread of the event loop.

    Args:
        coordinator: host:port.
        token: the join token of the run.
        hello: returns the first message; its argument is the number of the lost connection that it resumes, if any.
        tls: directory for `tls_context`; None: no TLS.
    """

    def __init__(
        self, coordinator: str, token: str, hello: Callable[[int | None], Message], *, tls: Path | None = None
    ) -> None:
        self._coordinator = coordinator
        self._token = token
        self._hello = hello
        self._tls = tls
        self._connection: ClientConnection | None = None
        self._number: int | None = None  # of the newest connection that the coordinator has acknowledged
        self._reconnect_s = 0.0
        self._is_over = False
        self._kept: deque[Message] = deque()  # messages that are not acknowledged
        self._acknowledged = 0  # messages before these
        self._sent = 0  # messages that were sent on this connection, or are known to have been received
        self._changed = asyncio.Event()  # whether a message has been added or sent

    async def connect(self) -> None:
        """Connect and introduce this peer. Raises OSError or InvalidHandshake."""
        self._connection = await control_connection(self._coordinator, self._token, tls=self._tls)
        await self._connection.send(encode(self._hello(self._number)))

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the coordinator sends, until it is lost for good, or `end` is called and the connection ends."""
        while self._connection is not None:
            sending: asyncio.Task[None] | None = None
            try:
                async for text in self._connection:
                    message = decode(text)
                    if isinstance(message, Acknowledged):
                        self._acknowledge(message)
                        sending = sending or asyncio.create_task(self._send_all(self._connection))
                    else:
                        yield message
            except ConnectionClosed:
                pass
            finally:
                if sending is not None:
                    sending.cancel()
            await self._reconnect()

    def send(self, message: Message) -> None:
        """Send as soon as that is possible; messages go out in the order they were given."""
        self._kept.append(message)
        self._changed.set()

    async def flush(self) -> None:
        """Wait until everything given so far has been handed to the network."""
        while self._sent < self._acknowledged + len(self._kept):
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> None:
        """Do not reconnect."""
        self._is_over = True

    async def close(self) -> None:
        """Close the connection, and do not reconnect."""
        self.end()
        if self._connection is not None:
            await self._connection.close()

    def abort(self) -> None:
        """Cut the connection without a word, as a lost network would."""
        if self._connection is not None:
            self._connection.transport.abort()

    def _acknowledge(self, message: Acknowledged) -> None:
        if message.connection != self._number:
            self._number = message.connection
            self._sent = max(message.received, self._acknowledged)
        self._reconnect_s = message.reconnect_s
        while self._acknowledged < message.received:
            self._kept.popleft()
            self._acknowledged += 1

    async def _send_all(self, connection: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                while self._sent < self._acknowledged + len(self._kept):
                    await connection.send(encode(self._kept[self._sent - self._acknowledged]))
                    self._sent += 1
                    self._changed.set()
                self._changed.clear()
                await self._changed.wait()

    async def _reconnect(self) -> None:
        self._connection = None
        loop, pause_s = asyncio.get_running_loop(), _RETRY_S
        until_s = loop.time() + self._reconnect_s
        while not self._is_over and loop.time() < until_s:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MAX_S)
            with contextlib.suppress(OSError, InvalidHandshake, ConnectionClosed, EOFError, TimeoutError):
                await self.connect()
                return
