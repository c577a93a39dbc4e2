"""A connection to coordinators that are lost and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve

from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.connection import ControlConnection
from chameleon_ft.control.wire.messages import Acknowledged, Exit, Hello, Message, Started, Stop


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
        message = Acknowledged(connection=number, received=received, reconnect_s=self.reconnect_s)
        await connection.send(encode(message))


def connected(
    coordinators: Callable[[ServerConnection], Coroutine[Any, Any, None]],
    body: Callable[[ControlConnection], Coroutine[Any, Any, None]],
) -> None:
    async def whole() -> None:
        async with serve(coordinators, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            connection = ControlConnection(
                f"127.0.0.1:{port}", "token", lambda resumes: Hello(worker=1, host="h", resumes=resumes)
            )
            await connection.connect()
            await body(connection)

    asyncio.run(whole())


@settings(max_examples=15, deadline=None)
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
        await connection.send(encode(Acknowledged(connection=5, received=0, reconnect_s=30.0)))
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


def test_the_search_for_a_coordinator_ends() -> None:
    coordinators = Coordinators([0], reconnect_s=0.0)

    async def body(connection: ControlConnection) -> None:
        connection.send(Started(generation=1))
        assert [message async for message in connection.messages()] == []

    connected(coordinators, body)
    assert len(coordinators.hellos) == 1
