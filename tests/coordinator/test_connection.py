"""A connection to coordinators that are lost and replaced."""

from __future__ import annotations

import asyncio
import http
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Response

from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.connection import WILL_RETURN, ControlConnection
from chameleon_ft.protocol.messages import Acknowledged, Exit, Hello, Message, Started, Stop
from chameleon_ft.protocol.parts import Member
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.examples import examples


@dataclass
class Coordinators:
    """One coordinator after the other at one address; what they received is in the journal that they share."""

    lasts: list[int]
    """How many messages each of them receives before it is lost; the last one goes on."""
    received: list[int] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    reconnect_s: float = 30.0

    async def __call__(self, connection: ServerConnection) -> None:
        hello = decode(await connection.recv())
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        await self.acknowledge(connection)
        number = len(self.hellos) - 1
        left = self.lasts[number] if number < len(self.lasts) else -1
        async for text in connection:
            if left == 0:
                connection.transport.abort()  # what has just come is not in the journal
                return
            left -= 1
            message = decode(text)
            assert isinstance(message, Started)
            self.received.append(message.generation)
            if message.generation % 3 == 0:
                await self.acknowledge(connection)
            if message.generation == 19:
                await connection.send(encode(Exit(reason="all came")))
                return

    async def acknowledge(self, connection: ServerConnection) -> None:
        number, received = 10 * len(self.hellos), len(self.received)
        message = Acknowledged(connection=number, received=received, term=1, lease_s=30.0, reconnect_s=self.reconnect_s)
        await connection.send(encode(message))


def hello(resumes: int | None, term: int) -> Hello:
    return Hello(member=Member(1, 0), host="h", resumes=resumes, term=term)


def connected(
    coordinators: Callable[[ServerConnection], Coroutine[Any, Any, None]],
    body: Callable[[ControlConnection], Coroutine[Any, Any, None]],
    *,
    accept: Callable[..., Coroutine[Any, Any, None]] | None = None,
) -> None:
    async def whole() -> None:
        async with serve(coordinators, "127.0.0.1", 0, process_request=accept) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            connection = ControlConnection(
                CoordinatorAccess(address=f"127.0.0.1:{port}", token="token"),
                lambda resumes, term: Hello(member=Member(1, 0), host="h", resumes=resumes, term=term),
            )
            await connection.connect()
            await body(connection)

    asyncio.run(whole())


@settings(max_examples=examples(15), deadline=None)
@given(lasts=st.lists(st.integers(0, 8), max_size=3))
def test_every_message_arrives_once_and_in_order(lasts: list[int]) -> None:
    coordinators = Coordinators(lasts)

    async def body(connection: ControlConnection) -> None:
        for number in range(20):
            connection.send(Started(generation=number))
        received = [message async for message in until_exit(connection)]
        assert received == [Exit(reason="all came")]
        await connection.flush()

    connected(coordinators, body)
    assert coordinators.received == list(range(20))
    assert [hello.resumes for hello in coordinators.hellos] == [
        None,
        *(10 * number for number in range(1, len(coordinators.hellos))),
    ]


async def until_exit(connection: ControlConnection) -> Any:
    async for message in connection.messages():
        if isinstance(message, Exit):
            connection.end()
        yield message


def test_what_a_coordinator_says_is_heard_from_its_successor_too() -> None:
    lost = asyncio.Event()

    async def coordinator(connection: ServerConnection) -> None:
        hello = decode(await connection.recv())
        assert isinstance(hello, Hello)
        await connection.send(encode(Acknowledged(connection=5, received=0, term=1, lease_s=30.0, reconnect_s=30.0)))
        await connection.send(encode(Stop(generation=1 if hello.resumes is None else 2)))
        if hello.resumes is None:
            await lost.wait()
            connection.transport.abort()

    heard: list[Message] = []

    async def body(connection: ControlConnection) -> None:
        async for message in connection.messages():
            heard.append(message)
            lost.set()
            if len(heard) == 2:
                connection.end()

    connected(coordinator, body)
    assert heard == [Stop(generation=1), Stop(generation=2)]


def test_what_a_coordinator_has_handled_and_not_written_is_sent_to_the_next_one() -> None:
    received: list[list[int]] = []

    async def coordinator(connection: ServerConnection) -> None:
        await connection.recv()
        own: list[int] = []
        received.append(own)
        # The second one has handled all three messages, and lost two of them when it is lost.
        handled, written = [(0, 0), (3, 1), (1, 1)][len(received) - 1]
        fields = {"term": 1, "lease_s": 30.0, "reconnect_s": 30.0}
        await connection.send(
            encode(Acknowledged(connection=len(received), received=handled, written=written, **fields))
        )
        for _ in range({1: 3, 2: 0, 3: 2}[len(received)]):
            message = decode(await connection.recv())
            assert isinstance(message, Started)
            own.append(message.generation)
        if len(received) < 3:
            connection.transport.abort()
        else:
            await connection.send(encode(Exit(reason="all came")))

    async def body(connection: ControlConnection) -> None:
        for number in range(3):
            connection.send(Started(generation=number))
        assert [message async for message in until_exit(connection)] == [Exit(reason="all came")]

    connected(coordinator, body)
    assert received == [[0, 1, 2], [], [1, 2]]


def test_a_coordinator_that_is_lost_as_soon_as_it_has_accepted_is_sought_again() -> None:
    """The peer has not even said who it is."""
    coordinators = Coordinators([0])
    accepted = 0

    async def accept(connection: ServerConnection, *_: object) -> None:
        nonlocal accepted
        accepted += 1
        if 1 < accepted < 4:
            response = connection.protocol.accept(connection.request)  # type: ignore[arg-type]
            connection.protocol.send_response(response)
            connection.send_data()
            connection.transport.close()

    async def body(connection: ControlConnection) -> None:
        connection.send(Started(generation=19))
        assert [message async for message in until_exit(connection)] == [Exit(reason="all came")]

    connected(coordinators, body, accept=accept)
    assert len(coordinators.hellos) == 2
    assert accepted == 4


def test_the_search_for_a_coordinator_ends() -> None:
    coordinators = Coordinators([0], reconnect_s=0.0)

    async def body(connection: ControlConnection) -> None:
        connection.send(Started(generation=1))
        assert [message async for message in connection.messages()] == []

    connected(coordinators, body)
    assert len(coordinators.hellos) == 1


# --- several coordinators --------------------------------------------------------------------------------------------


@dataclass
class Leader:
    """A coordinator of one term, which gives one order to each peer that it knows."""

    term: int
    standbys: list[str] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    is_stopped: bool = False
    """Whether it accepts connections and says nothing."""
    lease_s: float = 30.0
    has_ordered: asyncio.Event = field(default_factory=asyncio.Event)
    connections: list[ServerConnection] = field(default_factory=list)
    address: str = ""

    lose: Callable[[], None] = lambda: None

    async def __call__(self, connection: ServerConnection) -> None:
        hello = decode(await connection.recv())
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        self.connections.append(connection)
        if not self.is_stopped:
            fields = {"term": self.term, "lease_s": self.lease_s, "reconnect_s": 30.0, "standbys": tuple(self.standbys)}
            await connection.send(encode(Acknowledged(connection=len(self.hellos), received=0, **fields)))
        await connection.send(encode(Stop(generation=self.term)))
        self.has_ordered.set()
        await connection.wait_closed()


def between(
    leaders: list[Leader],
    scene: Callable[[ControlConnection, list[Message]], Coroutine[Any, Any, None]],
    *,
    run: RunDirectory | None = None,
) -> list[Message]:
    """Let a peer of the first of several coordinators listen during a scene, and return what it obeyed.

    With a run directory, only that has the addresses of the others, which are written there in the scene.
    """
    heard: list[Message] = []

    async def listen(connection: ControlConnection) -> None:
        async for message in connection.messages():
            heard.append(message)

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            for leader in leaders:
                server = await stack.enter_async_context(serve(leader, "127.0.0.1", 0))
                leader.lose = server.close
                leader.address = f"127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            leaders[0].standbys += [leader.address for leader in leaders[1:] if run is None]
            path = None if run is None else run.path
            access = CoordinatorAccess(address=leaders[0].address, token="token", run=path)
            connection = ControlConnection(access, hello)
            await connection.connect()
            listening = asyncio.create_task(listen(connection))
            await scene(connection, heard)
            await connection.close()
            await listening

    asyncio.run(whole())
    return heard


def test_a_peer_finds_the_standby_that_leads_among_all() -> None:
    first, lower, next_one = Leader(4), Leader(3), Leader(5)

    async def scene(connection: ControlConnection, heard: list[Message]) -> None:
        await first.has_ordered.wait()
        first.is_stopped = True
        first.connections[0].transport.abort()
        await next_one.has_ordered.wait()
        while len(heard) < 2:
            await asyncio.sleep(0)
        assert connection.coordinator == next_one.address

    assert between([first, lower, next_one], scene) == [Stop(generation=4), Stop(generation=5)]
    assert [hello.term for hello in next_one.hellos] == [4]
    assert [hello.resumes for hello in next_one.hellos] == [1]


def test_a_peer_finds_a_successor_that_it_was_not_told_of_by_the_run_directory(tmp_path: Path) -> None:
    first, successor = Leader(4), Leader(5)
    run = RunDirectory(tmp_path)

    async def scene(connection: ControlConnection, heard: list[Message]) -> None:
        await first.has_ordered.wait()
        first.lose()
        run.write_control(ControlAddress(address=successor.address, token="token", pid=1))
        await successor.has_ordered.wait()
        while len(heard) < 2:
            await asyncio.sleep(0)
        assert connection.coordinator == successor.address
        assert connection.access.run == run.path, "ranks that are started later look there, too"

    assert between([first, successor], scene, run=run) == [Stop(generation=4), Stop(generation=5)]


def test_nothing_is_obeyed_of_a_coordinator_of_a_lower_term() -> None:
    first, lower = Leader(4), Leader(3)

    async def scene(connection: ControlConnection, heard: list[Message]) -> None:
        await first.has_ordered.wait()
        first.is_stopped = True
        first.connections[0].transport.abort()
        await lower.has_ordered.wait()
        first.is_stopped = False
        while len(heard) < 2:
            await asyncio.sleep(0)

    assert between([first, lower], scene) == [Stop(generation=4), Stop(generation=4)]
    assert lower.hellos


def test_a_peer_gives_up_a_silent_coordinator_and_says_so() -> None:
    first, other = Leader(4, lease_s=0.2), Leader(5)

    async def scene(connection: ControlConnection, heard: list[Message]) -> None:
        await first.has_ordered.wait()
        first.is_stopped = True
        first.connections[0].transport.pause_reading()
        await other.has_ordered.wait()
        first.connections[0].transport.resume_reading()
        await first.connections[0].wait_closed()
        assert first.connections[0].close_code == WILL_RETURN
        while len(heard) < 2:
            await asyncio.sleep(0)

    assert between([first, other], scene) == [Stop(generation=4), Stop(generation=5)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_peer_that_starts_while_no_coordinator_leads_tries_all_until_one_does(number: int) -> None:
    leads, leader = asyncio.Event(), Leader(5)

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as lost:
            gone = f"127.0.0.1:{lost.getsockname()[1]}"

        def refusing(connection: ServerConnection, _: object) -> Response | None:
            refused.set()
            return None if leads.is_set() else connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "")

        refused = asyncio.Event()
        async with serve(leader, "127.0.0.1", 0, process_request=refusing) as server:
            own = f"127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            address, *others = [[own], [gone, own]][number]
            access = CoordinatorAccess(address=address, token="token", others=tuple(others), patience_s=30.0)
            connection = ControlConnection(access, hello)
            connecting = asyncio.create_task(connection.connect())
            await refused.wait()
            leads.set()
            await connecting
            async for message in connection.messages():
                assert message == Stop(generation=5)
                assert (connection.coordinator, leader.hellos[0].resumes) == (own, None)
                await connection.close()

    asyncio.run(scene())


def test_a_peer_that_finds_no_coordinator_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as lost:
        gone = f"127.0.0.1:{lost.getsockname()[1]}"
    access = CoordinatorAccess(address=gone, token="token", patience_s=0.1)
    with pytest.raises(OSError, match="Connect call failed"):
        asyncio.run(ControlConnection(access, hello).connect())
