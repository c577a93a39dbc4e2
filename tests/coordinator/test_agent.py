"""An agent and its coordinator, with processes that only seem to be."""

from __future__ import annotations

import asyncio
import math
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from websockets.asyncio.server import ServerConnection, serve

from chameleon_ft.errors import ControlError
from chameleon_ft.host.agent import Agent
from chameleon_ft.host.processes import read_stat, start_time
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.messages import (
    Acknowledged,
    Adopt,
    Drain,
    Examine,
    Exit,
    HostExamined,
    HostHello,
    Kill,
    Message,
    Probe,
    ProcessState,
    Spawn,
    WorkerExited,
)
from chameleon_ft.protocol.parts import HostReport, Member, RankProcess
from tests.golden import refused


@dataclass
class Process:
    """Runs until it is ended."""

    pid: int = 0
    exit_code: asyncio.Future[int] = field(default_factory=asyncio.Future)

    def end(self, exit_code: int) -> None:
        self.exit_code.set_result(exit_code)

    def kill(self) -> None:
        if not self.exit_code.done():
            self.end(-9)

    async def wait(self) -> int:
        return await self.exit_code


@dataclass
class Starter:
    """Starts them, as a fork server does, once `may_start` is set."""

    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    error: ControlError | None = None
    started: list[Process] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, **arguments: Any) -> Process:
        await self.may_start.wait()
        if self.error is not None:
            raise self.error
        self.arguments.append(arguments)
        self.started.append(Process())
        return self.started[-1]


def play(
    starter: Starter,
    coordinator: Callable[[ServerConnection], Coroutine[Any, Any, None]],
    *,
    terminated: threading.Event | None = None,
    examine: Callable[[Examine], Coroutine[Any, Any, HostReport]] | None = None,
) -> Exit | None:
    """Have an agent serve a coordinator; once `terminated` is set, it is to drain its workers."""

    async def scene() -> Exit | None:
        mistakes: list[BaseException] = []

        async def handler(connection: ServerConnection) -> None:
            assert isinstance(decode(await connection.recv()), HostHello)
            await tell(connection, Acknowledged(connection=1, received=0, term=1, lease_s=30.0, reconnect_s=0.0))
            try:
                await coordinator(connection)
            except BaseException as error:
                mistakes.append(error)
                raise
            finally:
                for process in starter.started:
                    process.kill()

        async with serve(handler, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            agent = Agent(
                CoordinatorAccess(address=f"127.0.0.1:{port}", token="token"),
                slots=2,
                host=None,
                start_rank=cast(Any, starter),
                examine=examine,
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
    starter = Starter()

    async def coordinator(connection: ServerConnection) -> None:
        await tell(
            connection, Spawn(members=(Member(0, 1), Member(1, 1))), *(Probe(probe=number) for number in range(200))
        )
        await (await connection.ping())  # should it not be answered, the test's time limit says so
        starter.may_start.set()
        await tell(connection, Exit(reason="over"))

    assert play(starter, coordinator)


def test_a_later_life_has_the_place_of_the_first_and_reports_for_itself() -> None:
    starter = Starter()
    starter.may_start.set()

    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Spawn(members=(Member(4, 1), Member(7, 1))))
        while len(starter.started) < 2:
            await asyncio.sleep(0)
        starter.started[1].end(-9)
        assert await heard(connection) == WorkerExited(member=Member(7, 1), exit_code=-9)
        await tell(connection, Kill(worker=7), Spawn(members=(Member(7, 2),)))
        while len(starter.started) < 3:
            await asyncio.sleep(0)
        starter.started[2].end(1)
        assert await heard(connection) == WorkerExited(member=Member(7, 2), exit_code=1)
        await tell(connection, Exit(reason="over"))

    assert play(starter, coordinator)
    found = [(*each["member"], each["local_index"]) for each in starter.arguments]
    assert found == [(4, 1, 0), (7, 1, 1), (7, 2, 1)]


def test_an_examination_ends_when_another_one_begins() -> None:
    began, ended = asyncio.Event(), list[int]()

    async def examine(order: Examine) -> HostReport:
        began.set()
        try:
            await asyncio.sleep(0 if order.request == 2 else math.inf)
        finally:
            ended.append(order.request)
        return HostReport(clock_s=0.0)

    async def coordinator(connection: ServerConnection) -> None:
        order = Examine(device="cpu", backend="gloo", workers=2, share_devices=False, measures=True, request=1)
        await tell(connection, order)
        await began.wait()
        await tell(connection, order.model_copy(update={"request": 2}))
        answer = await heard(connection)
        assert isinstance(answer, HostExamined)
        assert answer.request == 2
        assert ended == [1, 2]
        await tell(connection, Exit(reason="over"))

    assert play(Starter(), coordinator, examine=examine)


def test_it_leaves_where_a_rank_cannot_be_started() -> None:
    starter = Starter(error=ControlError("no more processes"))
    starter.may_start.set()

    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Spawn(members=(Member(0, 1),)))
        await connection.wait_closed()

    with refused(ControlError):
        play(starter, coordinator)


@pytest.mark.parametrize(("exit_code", "code"), [(0, 0), (75, 75), (-9, None)])
def test_it_ends_with_the_run_that_is_over_before_it_has_reconnected(
    starter: Starter, exit_code: int, code: int | None
) -> None:
    gone = asyncio.Event()

    async def coordinator(connection: ServerConnection) -> None:
        assert isinstance(decode(await connection.recv()), HostHello)
        patience_s = 1.0 if code is None else 1000.0
        await tell(connection, Acknowledged(connection=1, received=0, term=1, lease_s=30.0, reconnect_s=patience_s))
        await spawned(connection, starter, 7, 4)
        gone.set()
        connection.transport.abort()

    async def scene() -> Exit | None:
        refusing = lambda connection, _: connection.respond(503, "gone") if gone.is_set() else None  # noqa: E731
        async with serve(coordinator, "127.0.0.1", 0, process_request=refusing) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            access = CoordinatorAccess(address=f"127.0.0.1:{port}", token="token")
            agent = Agent(access, slots=2, host=None, start_rank=cast(Any, starter))
            serving = asyncio.ensure_future(agent.serve())
            await gone.wait()
            for process in starter.started:
                process.end(exit_code)
            return await serving

    order = asyncio.run(scene())
    assert (order and order.exit_code) == code


def test_it_ends_with_its_coordinator_if_it_never_had_a_worker(starter: Starter) -> None:
    async def coordinator(connection: ServerConnection) -> None:
        connection.transport.abort()

    order = play(starter, coordinator)
    assert order == Exit(reason="the coordinator is gone, and no worker of this host was in the run")
    assert order is not None
    assert order.exit_code == 0


# --- drained ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def starter() -> Starter:
    """A fork server whose processes start at once."""
    made = Starter()
    made.may_start.set()
    return made


async def spawned(connection: ServerConnection, starter: Starter, *workers: int) -> None:
    await tell(connection, Spawn(members=tuple(Member(worker, 1) for worker in workers)))
    while len(starter.started) < len(workers):
        await asyncio.sleep(0)


def test_it_has_its_workers_drained_and_ends_when_told_to(starter: Starter) -> None:
    terminated = threading.Event()

    async def coordinator(connection: ServerConnection) -> None:
        await spawned(connection, starter, 7, 4)
        terminated.set()
        assert await heard(connection) == Drain()
        await tell(connection, Drain(workers=(4, 7)))
        for process, worker in zip(starter.started, (7, 4), strict=True):
            await (await connection.ping())
            process.end(0)
            assert await heard(connection) == WorkerExited(member=Member(worker, 1), exit_code=0)
        await tell(connection, Exit(reason="drained", is_drained=True))

    assert play(starter, coordinator, terminated=terminated)


# --- adoption --------------------------------------------------------------------------------------------------------


@pytest.fixture
def orphan() -> Iterator[RankProcess]:
    """A process that this one did not start, as far as it knows."""
    with subprocess.Popen(["sleep", "100"]) as process:
        started = start_time(process.pid)
        assert started is not None
        yield RankProcess(pid=process.pid, started=started, local_index=0)
        process.kill()


def test_it_adopts_a_rank_and_starts_others_beside_it(starter: Starter, orphan: RankProcess) -> None:
    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Adopt(ranks=((Member(4, 1), orphan),)))
        await spawned(connection, starter, 7)
        await tell(connection, Probe(probe=1))
        states = [await heard(connection), await heard(connection)]
        assert ProcessState(probe=1, member=Member(4, 1), stopped=False) in states
        await tell(connection, Kill(worker=4))
        exited = await heard(connection)
        assert isinstance(exited, WorkerExited)
        assert (exited.member.worker, exited.exit_code in (None, -9)) == (4, True)
        await tell(connection, Exit(reason="over"))

    assert play(starter, coordinator)
    assert [each["local_index"] for each in starter.arguments] == [1], "the rank has the first accelerator"


def test_a_process_that_only_has_the_number_of_a_rank_is_left_alone(starter: Starter, orphan: RankProcess) -> None:
    other = orphan.model_copy(update={"started": orphan.started - 1})

    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Adopt(ranks=((Member(4, 1), other),), given_up=(other,)), Kill(worker=4))
        assert await heard(connection) == WorkerExited(member=Member(4, 1), exit_code=None)
        await spawned(connection, starter, 4)
        await tell(connection, Exit(reason="over"))

    assert play(starter, coordinator)
    assert start_time(orphan.pid) == orphan.started, "it lives"
    assert read_stat(orphan.pid)[0] != "Z"


def test_what_was_given_up_ends_before_another_process_starts(starter: Starter, orphan: RankProcess) -> None:
    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Adopt(given_up=(orphan,)))
        await spawned(connection, starter, 4)
        assert (read_stat(orphan.pid) or ["gone"])[0] in ("Z", "gone")
        await tell(connection, Exit(reason="over"))

    assert play(starter, coordinator)


@pytest.mark.parametrize("may_start", [False, True])
def test_it_ends_when_all_tasks_of_its_event_loop_are_cancelled(starter: Starter, may_start: bool) -> None:
    """Whatever they are: the one that reaps a rank ends before the rank does."""

    async def coordinator(connection: ServerConnection) -> None:
        await tell(connection, Spawn(members=(Member(0, 1), Member(1, 1))))
        if may_start:
            starter.may_start.set()
            while len(starter.started) < 2:
                await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            task.cancel()
        await connection.wait_closed()

    with pytest.raises(asyncio.CancelledError):
        play(starter, coordinator)
    assert all(process.exit_code.done() for process in starter.started)
