"""The client's end of the control connections, which outlasts the coordinator, and the heartbeats of both ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync import client as blocking

from chameleon_ft.errors import ConfigError
from chameleon_ft.protocol.address import CoordinatorAccess, bearer, tls_context, websocket_url
from chameleon_ft.protocol.background_tasks import in_thread
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import Acknowledged, Message, Refused
from chameleon_ft.storage.files import RunDirectory

_PEERS_PER_S: Final = 600
"""Peers that a coordinator asks for a sign of life in a second."""

_PARTS: Final = 4
"""Parts of the wait for the answer to a ping."""

WILL_RETURN: Final = 4000
"""Close code of a peer that gives up a silent connection, and makes another one."""


class HeardConnection(Connection):
    """A connection that notes when data of its other end has arrived, by the clock of the event loop.

    Attributes:
        heard: called then.
    """

    heard_at_s: float = -math.inf
    heard: Callable[[], None] | None = None

    def data_received(self, data: bytes) -> None:
        self.heard_at_s = self.loop.time()
        if self.heard is not None:
            self.heard()
        super().data_received(data)


def heartbeat_interval_s(timeout_s: float, peers: int) -> float:
    """Return the seconds of silence after which a coordinator of so many peers pings one of them.

    With thousands of peers these seconds grow, because their heartbeats must leave it time for all else.
    """
    return max(timeout_s / 4, peers / _PEERS_PER_S)


async def watch_heartbeat(
    connection: HeardConnection,
    *,
    every_s: float,
    timeout_s: float,
    silent: Callable[[float], None],
) -> None:
    """Ping the other end once nothing has arrived from it for `every_s` seconds, until the connection is closed.

    Seconds in which this process did not run do not count: the answer may have come meanwhile, and the ping itself may
    have waited behind orders that only this process hands to the network. Nor do those in which other data has arrived:
    after a reconnection, thousands of messages may be ahead of a ping or of its answer.

    Args:
        silent: called once a ping is unanswered for `timeout_s` and nothing else arrives, and from then on every
            `every_s` until it is answered, with these seconds.
    """
    loop, part_s = asyncio.get_running_loop(), min(every_s, timeout_s / _PARTS)
    with contextlib.suppress(ConnectionClosed):
        while True:
            left_s = every_s
            while left_s > 0:
                await asyncio.sleep(left_s)
                left_s = connection.heard_at_s + every_s - loop.time()
            # A ping may also wait behind messages that the network does not take.
            pong, waited_s, silent_s = asyncio.create_task(_ping(connection)), 0.0, timeout_s
            try:
                while not pong.done():
                    # In small parts, to distinguish time in which this process was busy from time spent waiting.
                    pause_s, before_s = min(part_s, silent_s - waited_s), loop.time()
                    # Unlike `wait_for`, this takes a pong that came while this process did not run to see it.
                    await asyncio.wait({pong}, timeout=pause_s)
                    # After a stall, the pong may be behind other messages that have come meanwhile.
                    if connection.heard_at_s > before_s:
                        waited_s, silent_s = 0.0, timeout_s
                    elif loop.time() - before_s < pause_s + part_s:
                        waited_s += pause_s
                    if waited_s >= silent_s and not pong.done():
                        silent(waited_s)
                        silent_s += every_s
                await pong
            finally:
                pong.cancel()


async def _ping(connection: Connection) -> None:
    """Send a ping, and wait for its answer."""
    await (await connection.ping())


# Until the coordinator has told its lease, by which its silence is measured then.
_PING_EVERY_S: Final = 10.0
_PING_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.05  # wait before the first attempt to reconnect; twice as long before each that follows
_RETRY_MAX_S: Final = 0.5
_CLOSE_S: Final = 0.1  # for the close frame of a connection that is given up
_FAILURES: Final = (OSError, InvalidHandshake, ConnectionClosed, EOFError, TimeoutError)
_ANSWER_S: Final = 30.0  # for the answer to a handshake; a coordinator may have been held up


class _Connection(HeardConnection, ClientConnection):
    """A connection of a process that may have been held up: a pong counts, however late it is seen."""

    async def keepalive(self) -> None:
        await watch_heartbeat(
            self, every_s=_PING_EVERY_S, timeout_s=_PING_TIMEOUT_S, silent=lambda _: self.transport.abort()
        )


def blocking_connection(
    coordinator: str, token: str, *, tls: Path | None, open_timeout_s: float = 10.0
) -> blocking.ClientConnection:
    """Connect a command, which asks and leaves, to the coordinator at host:port.

    Args:
        tls: as for `control_connection`.
        open_timeout_s: seconds for the answer to the handshake.

    Raises:
        ConfigError: the directory of `tls` cannot be used.
        OSError, WebSocketException: no coordinator answers, or it rejects the token.
    """
    return blocking.connect(
        websocket_url(coordinator, tls=tls is not None),
        ssl=tls_context(tls),
        additional_headers=bearer(token),
        proxy=None,
        compression=None,
        max_size=None,
        open_timeout=open_timeout_s,
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
        open_timeout=_ANSWER_S,
        close_timeout=_CLOSE_TIMEOUT_S,
        create_connection=_Connection,
        compression=None,
        max_size=None,
        proxy=None,
    )


class ControlConnection:
    """A connection to the coordinator that leads, which is made again when it is lost.

    It tries the coordinator that it has lost and those that stand by in turn, and obeys the one of the highest term
    only. Messages are kept until they are acknowledged, and sent again after a reconnection. All methods are called in
    the thread of the event loop.

    Args:
        hello: returns the first message; its arguments are the number of the lost connection that it resumes, if any,
            and the highest term known.
        is_needed: returns whether to look for a coordinator any longer.
    """

    def __init__(
        self,
        access: CoordinatorAccess,
        hello: Callable[[int | None, int], Message],
        *,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_needed = is_needed
        self._access = access
        self._addresses: deque[str] = deque([access.address, *access.others])  # to try; the present one first
        self._hello = hello
        self._connection: ClientConnection | None = None
        self._number: int | None = None  # of the newest connection that the coordinator has acknowledged
        self._term = 0  # highest of a coordinator that was obeyed
        self._lease_s = _PING_EVERY_S
        self._patience_s = access.patience_s
        self._lost_at_s: float | None = None  # when the last connection that was acknowledged ended
        self._is_over = False
        self._kept: deque[Message] = deque()  # messages that are not acknowledged
        self._acknowledged = 0  # messages before these
        self._sent = 0  # messages that were sent on this connection, or are known to have been received
        self._changed = asyncio.Event()  # whether a message has been added or sent

    @property
    def coordinator(self) -> str:
        """The host:port of the coordinator."""
        return self._addresses[0]

    @property
    def access(self) -> CoordinatorAccess:
        """The way to the coordinator by which another process is to connect now."""
        address, *others = self._addresses
        return replace(self._access, address=address, others=tuple(others), patience_s=self._patience_s)

    async def connect(self) -> None:
        """Connect and introduce this peer. Raises OSError or InvalidHandshake."""
        if len(self._addresses) > 1 or self._patience_s:
            await self._reconnect(first_place=0)
        if self._connection is None:  # if none was found, the error tells why
            await self._introduce(await self._open(self.coordinator))

    async def _introduce(self, connection: ClientConnection) -> None:
        try:
            await connection.send(encode(self._hello(self._number, self._term)))
        except BaseException:
            connection.transport.abort()
            raise
        self._connection = connection

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the coordinator sends, until it is lost for good, or `end` is called and the connection ends.

        Nothing counts before the coordinator has told its term, but for its refusal, and nothing of a lower term.
        """
        while (connection := self._connection) is not None:
            tasks: list[asyncio.Task[None]] = []
            try:
                async for text in connection:
                    message = decode(text)
                    if isinstance(message, Acknowledged) and message.term >= self._term:
                        self._acknowledge(message)
                        tasks = tasks or [
                            asyncio.create_task(self._send_all(connection)),
                            asyncio.create_task(self._watch(connection)),
                        ]
                    elif isinstance(message, Refused) or (tasks and not isinstance(message, Acknowledged)):
                        yield message
                    else:
                        connection.transport.abort()
            except ConnectionClosed:
                pass
            finally:
                for task in tasks:
                    task.cancel()
            if tasks:
                self._lost_at_s = asyncio.get_running_loop().time()
            else:
                self._addresses.rotate(-1)
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
        """Abort the connection without a closing handshake, as a network failure would."""
        if self._connection is not None:
            self._connection.transport.abort()

    def _acknowledge(self, message: Acknowledged) -> None:
        if message.connection != self._number:
            self._number = message.connection
            self._sent = max(message.received, self._acknowledged)
        self._term, self._lease_s, self._patience_s = message.term, message.lease_s, message.reconnect_s
        self._addresses = deque(dict.fromkeys([self.coordinator, *message.standbys]))
        while self._acknowledged < (message.received if message.written is None else message.written):
            self._kept.popleft()
            self._acknowledged += 1

    async def _watch(self, connection: ClientConnection) -> None:
        """Cut the connection if the coordinator does not answer for its lease: it is stopped, or cut off."""

        def give_up(_: float) -> None:
            self._addresses.rotate(-1)
            closing.append(asyncio.ensure_future(connection.close(WILL_RETURN)))
            loop.call_soon(connection.transport.close)  # does not wait for the answer to the close frame
            loop.call_later(_CLOSE_S, connection.transport.abort)  # nor for the network

        closing: list[asyncio.Future[None]] = []  # the loop itself keeps none alive
        loop = asyncio.get_running_loop()
        assert isinstance(connection, HeardConnection)
        await watch_heartbeat(connection, every_s=self._lease_s / 2, timeout_s=self._lease_s / 2, silent=give_up)

    async def _send_all(self, connection: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                while self._sent < self._acknowledged + len(self._kept):
                    await connection.send(encode(self._kept[self._sent - self._acknowledged]))
                    self._sent += 1
                    self._changed.set()
                self._changed.clear()
                await self._changed.wait()

    async def _reconnect(self, *, first_place: int = 1) -> None:
        """Try all coordinators at the same time, until one takes this peer; the later a place, the longer the wait."""
        self._connection = None
        loop = asyncio.get_running_loop()
        # A connection that ends before it is acknowledged was not to a coordinator that leads.
        until_s = self._patience_s + (loop.time() if self._lost_at_s is None else self._lost_at_s)
        attempts = [asyncio.create_task(self._attempt(*each)) for each in enumerate(self._addresses, first_place)]
        if self._access.run is not None:
            attempts.append(asyncio.create_task(self._attempt_successor(RunDirectory(self._access.run))))
        try:
            while attempts and self._is_needed() and not self._is_over and loop.time() < until_s:
                done, _ = await asyncio.wait(attempts, timeout=_RETRY_MAX_S, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    attempts.remove(attempt)
                    address, found = attempt.result()
                    if address not in self._addresses:
                        self._addresses.append(address)
                    self._addresses.rotate(-self._addresses.index(address))
                    with contextlib.suppress(ConnectionClosed):
                        return await self._introduce(found)
                    attempts.append(asyncio.create_task(self._attempt(1 + len(attempts), address)))
        finally:
            for attempt in attempts:
                attempt.cancel()
                if attempt.done() and not attempt.cancelled():
                    attempt.result()[1].transport.abort()

    async def _attempt(self, place: int, address: str) -> tuple[str, ClientConnection]:
        """Connect to a coordinator as soon as it leads."""
        pause_s = _RETRY_S * place
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(max(_RETRY_S, 2 * pause_s), _RETRY_MAX_S)
            with contextlib.suppress(*_FAILURES):
                return address, await self._open(address)

    async def _attempt_successor(self, run: RunDirectory) -> tuple[str, ClientConnection]:
        """Connect to the coordinator whose address is in the run directory, if this peer was not told of that one."""
        while True:
            await asyncio.sleep(_RETRY_MAX_S)
            with contextlib.suppress(ConfigError, *_FAILURES):
                address = (await in_thread(run.read_control)).address
                if address not in self._addresses:
                    return address, await self._open(address)

    async def _open(self, address: str) -> ClientConnection:
        return await control_connection(address, self._access.token, tls=self._access.tls)
