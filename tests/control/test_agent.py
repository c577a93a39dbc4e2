"""An agent and its coordinator, with processes that only seem to be."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from websockets.asyncio.server import ServerConnection, serve

from chameleon_ft.control.agent import Agent
from chameleon_ft.control.wire.messages import (
    Exit,
    HostHello,
    Kill,
    Message,
    Probe,
    Spawn,
    WorkerExited,
    decode,
    encode,
)
from chameleon_ft.errors import ControlError


@dataclass
class Process:
    """Runs from its start until it is ended; `may_start` holds up its start."""

    kwargs: dict[str, Any]
    may_start: threading.Event
    error: OSError | None
    pid: int | None = None
    exitcode: int | None = None

    def __post_init__(self) -> None:
        self.sentinel, self._end = os.pipe()

    def start(self) -> None:
        self.may_start.wait()
        if self.error is not None:
            raise self.error

    def is_alive(self) -> bool:
        return False

    def end(self, exit_code: int) -> None:
        self.exitcode = exit_code
        os.close(self._end)

    def join(self) -> None:
        os.close(self.sentinel)


@dataclass
class Context:
    """Makes them, as a fork server does."""

    may_start: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None
    made: list[Process] = field(default_factory=list)

    def Process(self, *, target: object, name: str, kwargs: dict[str, Any]) -> Process:  # noqa: N802
        self.made.append(Process(kwargs, self.may_start, self.error))
        return self.made[-1]


def play(context: Context, coordinator: Callable[[ServerConnection], Coroutine[Any, Any, None]]) -> bool:
    """Have an agent serve a coordinator."""

    async def scene() -> bool:
        mistakes: list[BaseException] = []

        async def handler(connection: ServerConnection) -> None:
            assert isinstance(decode(await connection.recv()), HostHello)
            try:
                await coordinator(connection)
            except BaseException as error:
                mistakes.append(error)
                raise

        async with serve(handler, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            agent = Agent(
                coordinator=f"127.0.0.1:{port}",
                token="token",
                slots=2,
                host=None,
                context=cast(Any, context),
                entry=cast(Any, None),
            )
            ended = await agent.serve()
        assert not mistakes
        return ended

    return asyncio.run(scene())


async def tell(connection: ServerConnection, *messages: Message) -> None:
    for message in messages:
        await connection.send(encode(message))


async def heard(connection: ServerConnection) -> Message:
    return decode(await connection.recv())


def test_it_answers_while_it_starts_ranks() -> None:
    context = Context()

    async def coordinator(connection: ServerConnection) -> None:
        await tell(
            connection, Spawn(workers=(0, 1), incarnations=(1, 1)), *(Probe(probe=number) for number in range(200))
        )
        await (await connection.ping())  # should it not be answered, the test's time limit says so
        context.may_start.set()
        await tell(connection, Exit(reason="over"))

    assert play(context, coordinator)


def test_a_later_life_has_the_place_of_the_first_and_reports_for_itself() -> None:
    context = Context()
    context.may_start.set()

    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Spawn(workers=(4, 7), incarnations=(1, 1)))
        while len(context.made) < 2:
            await asyncio.sleep(0)
        await asyncio.to_thread(context.made[1].end, -9)
        assert await heard(connection) == WorkerExited(worker=7, incarnation=1, exit_code=-9)
        await tell(connection, Kill(worker=7), Spawn(workers=(7,), incarnations=(2,)))
        while len(context.made) < 3:
            await asyncio.sleep(0)
        context.made[2].end(1)
        assert await heard(connection) == WorkerExited(worker=7, incarnation=2, exit_code=1)
        await tell(connection, Exit(reason="over"))

    assert play(context, coordinator)
    found = [(each.kwargs["worker"], each.kwargs["incarnation"], each.kwargs["local_index"]) for each in context.made]
    assert found == [(4, 1, 0), (7, 1, 1), (7, 2, 1)]


def test_it_leaves_where_a_rank_cannot_be_started() -> None:
    context = Context(error=OSError("no more processes"))
    context.may_start.set()

    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Spawn(workers=(0,), incarnations=(1,)))
        await connection.wait_closed()

    with pytest.raises(ControlError, match="worker 0 cannot be started here: no more processes"):
        play(context, coordinator)
