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
from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.messages import (
    Acknowledged,
    Drain,
    Exit,
    HostHello,
    Kill,
    Message,
    Probe,
    Refused,
    Spawn,
    WorkerExited,
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


def play(
    context: Context,
    coordinator: Callable[[ServerConnection], Coroutine[Any, Any, None]],
    *,
    terminated: threading.Event | None = None,
) -> bool:
    """Have an agent serve a coordinator; once `terminated` is set, it is to drain its workers."""

    async def scene() -> bool:
        mistakes: list[BaseException] = []

        async def handler(connection: ServerConnection) -> None:
            assert isinstance(decode(await connection.recv()), HostHello)
            await tell(connection, Acknowledged(connection=1, received=0, reconnect_s=0.0))
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
            assert not agent.drain(), "it is not connected yet"
            serving = asyncio.ensure_future(agent.serve())
            if terminated is not None:
                await asyncio.to_thread(terminated.wait)
                assert agent.drain()
            ended = await serving
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


# --- drained ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def context() -> Context:
    """A fork server whose processes start at once."""
    made = Context()
    made.may_start.set()
    return made


async def spawned(connection: ServerConnection, context: Context, *workers: int) -> None:
    await tell(connection, Spawn(workers=workers, incarnations=(1,) * len(workers)))
    while len(context.made) < len(workers):
        await asyncio.sleep(0)


def test_it_has_its_workers_drained_and_ends_when_told_to(context: Context) -> None:
    terminated = threading.Event()

    async def coordinator(connection: ServerConnection) -> None:
        await spawned(connection, context, 7, 4)
        terminated.set()
        assert await heard(connection) == Drain()
        await tell(connection, Drain(workers=(4, 7)))
        for process, worker in zip(context.made, (7, 4), strict=True):
            await (await connection.ping())
            process.end(0)
            assert await heard(connection) == WorkerExited(worker=worker, exit_code=0)
        await tell(connection, Exit(reason="drained"))

    assert play(context, coordinator, terminated=terminated)


@pytest.mark.parametrize("answers", [[], [Drain(workers=(0,))]], ids=["at once", "later"])
def test_it_goes_on_if_its_workers_are_not_drained(
    context: Context, caplog: pytest.LogCaptureFixture, answers: list[Message]
) -> None:
    terminated = threading.Event()

    async def coordinator(connection: ServerConnection) -> None:
        await spawned(connection, context, 0)
        terminated.set()
        assert await heard(connection) == Drain()
        await tell(connection, *answers, Refused(reason="worker 0 is the last"))
        await (await connection.ping())
        context.made[0].end(-9)
        assert await heard(connection) == WorkerExited(worker=0, exit_code=-9)
        await tell(connection, Spawn(workers=(0,), incarnations=(2,)))
        while len(context.made) < 2:
            await asyncio.sleep(0)
        await tell(connection, Exit(reason="over"))

    assert play(context, coordinator, terminated=terminated)
    assert "the workers of this agent are not drained: worker 0 is the last" in caplog.text
