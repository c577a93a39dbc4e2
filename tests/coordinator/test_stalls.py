"""A coordinator that did not run for a while gives up no worker for a silence that was its own."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.events import Disconnected
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.protocol.connection import HeardConnection, watch_heartbeat
from chameleon_ft.protocol.messages import Position, ProcessState, Stop, WorkerExited
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History, new_state
from tests.coordinator.stage import StandingLoop
from tests.examples import examples


def training() -> History:
    history = History(new_state(recovery=Recovery(respawn=False)))
    history.train()
    history.wait(0.1)
    return history


def gathering() -> History:
    history = History()
    history.wait(0.1)
    history.gather_some(2)
    return history


def first_plan() -> History:
    history = History()
    history.wait(0.1)
    history.gather()
    return history


def stopping() -> History:
    history = training()
    history.reap(1)
    return history


def partly_stopped() -> History:
    history = stopping()
    history.quiesce(0)
    return history


def deciding() -> History:
    history = training()
    history.holds = True
    history.reap(1)
    history.quiesce()
    return history


def regrouping() -> History:
    history = stopping()
    history.quiesce()
    return history


def moving_layers() -> History:
    history = stopping()
    history.moves_to = 2
    history.quiesce()
    return history


def preparing() -> History:
    history = training()
    history.reap(1)
    history.quiesce()
    history.start()
    history.commit()
    history.wait(0.1)
    if history.considerations:
        history.consider(0, 2, 3)
        history.prepare(0)
    return history


def probing() -> History:
    """The watchdog waits for answers."""
    history = training()
    history.wait(1.0)
    return history


BEGINNINGS: list[Callable[[], History]] = [
    training,
    gathering,
    first_plan,
    stopping,
    partly_stopped,
    deciding,
    regrouping,
    moving_layers,
    preparing,
    probing,
]


@functools.cache
def _begun(beginning: Callable[[], History]) -> History:
    return beginning()


def begun(beginning: Callable[[], History]) -> History:
    """Return a history of its own with this beginning."""
    history = copy.copy(_begun(beginning))
    for name, value in vars(history).items():
        if isinstance(value, list | dict):
            setattr(history, name, copy.copy(value))
    return history


def stall(history: History, data: st.DataObject) -> None:
    """Have the coordinator not run, and then learn in any order what has happened meanwhile."""
    history.now += data.draw(st.floats(2.0, 2000.0), label="stall")
    members = [*history.live(), None] if history.state.members.agents else list(history.live())
    away = data.draw(st.lists(st.sampled_from(members), unique=True), label="away")
    before = {member: history.now_at(AGENT if member is None else history.connection(member)) for member in away}
    waiting = [(member, leaves) for member in away for leaves in (True, False)]
    while waiting:
        # A peer may be back before the end of its old connection is noticed.
        member, leaves = waiting.pop(data.draw(st.integers(0, len(waiting) - 1), label="next"))
        if leaves:
            history.happen(Disconnected(at=history.at, connection=before[member]))
        elif member is None:
            history.return_agent()
        else:
            history.return_worker(member, known=history.state.newest)
        if data.draw(st.booleans(), label="tick"):
            history.wait(data.draw(st.sampled_from((0.05, 0.5)), label="wait"))
    for worker in history.live():
        probe = history.state.detectors.watchdog.probe
        if data.draw(st.booleans(), label="answers"):
            history.tell(worker, Position(probe=probe, doing="forward", waiting=False, since_s=0.1))
        elif history.state.members.agents and None not in away:
            history.say(AGENT, ProcessState(probe=probe, member=Member(worker, 1), stopped=False))
    history.wait(0.1)


def to_training(history: History) -> None:
    history.holds = False
    while history.questions:
        history.answer(history.questions.pop(0))
    if history.state.phase is Phase.GATHERING:
        for worker in range(history.state.settings.workers):
            if worker not in history.live():
                history.join(worker)
    if history.state.phase is Phase.STOPPING:
        history.quiesce(*(worker for worker in history.live() if worker not in history.state.quiesced))
    if history.state.phase is Phase.REGROUPING:
        history.start()


@pytest.mark.parametrize("beginning", BEGINNINGS, ids=lambda beginning: beginning.__name__)
@given(data=st.data())
@settings(max_examples=examples(10))
def test_a_stall_loses_no_worker_and_ends_no_run(beginning: Callable[[], History], data: st.DataObject) -> None:
    history = begun(beginning)
    before, lost = set(history.live()), len(history.events("join_failed"))
    for _ in range(data.draw(st.integers(1, 2), label="stalls")):
        stall(history, data)
        assert before <= set(history.live())
    to_training(history)
    assert before <= set(history.live())
    committed = history.state.committed
    for _ in range(2):
        history.commit()
        history.wait(0.1)
    assert history.state.phase is Phase.TRAINING
    assert history.state.committed == committed + 2
    assert not history.state.reconnection.awaited
    assert len(history.events("join_failed")) == lost
    assert {worker for worker, _, _ in history.failures} <= {1}
    assert history.failures == [] or history.failures == [(1, "child", "SIGKILL")]


def test_workers_that_have_stopped_training_for_a_stall_are_told_to_begin_anew() -> None:
    history = regrouping()
    history.now += 25.0
    history.depart(history.connection(0))
    assert history.state.phase is Phase.STOPPING, "its orders may be lost"
    history.return_worker(0)
    assert len(history.sent(Stop, to=history.now_at(history.connection(0)))) == 1


def test_a_stall_excuses_no_process_that_ends() -> None:
    history = training()
    history.now += 25.0
    history.depart(history.connection(2))
    assert history.failures == []
    history.say(AGENT, WorkerExited(member=Member(2, 1), exit_code=-9))
    history.quiesce()
    history.start()
    assert history.failures == [(2, "child", "SIGKILL")]


def test_a_worker_that_does_not_come_back_after_a_stall_is_lost() -> None:
    history = training()
    history.now += 25.0
    history.depart(history.connection(2))
    history.wait(6.0)
    history.quiesce()
    history.start()
    assert history.failures == [(2, "connection", "control connection closed")]
    assert [round(event["stall_s"]) for event in history.events("stalled")] == [25]


def test_long_after_a_stall_a_closed_connection_is_a_loss_at_once() -> None:
    history = training()
    history.now += 25.0
    history.wait(10.0)
    history.depart(history.connection(2))
    assert history.live() == (0, 1, 3)


class Silence:
    """A connection whose other end answers no ping."""

    heard_at_s = -math.inf

    async def ping(self) -> asyncio.Future[float]:
        return asyncio.get_running_loop().create_future()


class FullSilence(Silence):
    """A connection on which a ping waits behind messages that the network does not take."""

    async def ping(self) -> asyncio.Future[float]:
        written: asyncio.Future[asyncio.Future[float]] = asyncio.get_running_loop().create_future()
        return await written


class Busy(Silence):
    """A connection on which messages arrive, and the answer to a ping is behind them."""

    @property
    def heard_at_s(self) -> float:  # type: ignore[override]
        return asyncio.get_running_loop().time()


@pytest.mark.parametrize("connection", [Silence(), FullSilence(), Busy()])
def test_the_end_of_a_connection_that_sends_nothing_is_silent(connection: Silence) -> None:
    reported: list[float] = []

    async def watch() -> None:
        heard = cast(HeardConnection, connection)
        watching = asyncio.create_task(watch_heartbeat(heard, every_s=0.01, timeout_s=0.02, silent=reported.append))
        until_s = asyncio.get_running_loop().time() + 30
        for turn in itertools.count():
            await asyncio.sleep(0.01)
            if reported or asyncio.get_running_loop().time() > until_s or (turn > 10 and isinstance(connection, Busy)):
                break
        watching.cancel()

    asyncio.run(watch())
    assert bool(reported) is not isinstance(connection, Busy)


def test_heartbeats_do_not_count_the_time_in_which_they_were_not_watched() -> None:
    reported: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        skipped_s = 0.0
        time, loop.time = loop.time, lambda: time() + skipped_s  # type: ignore[method-assign]
        enough = asyncio.Event()

        def silent(since_s: float) -> None:
            reported.append(since_s)
            if len(reported) == 2:
                enough.set()

        connection = cast(HeardConnection, Silence())
        watching = asyncio.create_task(watch_heartbeat(connection, every_s=0.05, timeout_s=0.1, silent=silent))
        await asyncio.sleep(0.06)
        skipped_s = 25.0
        await enough.wait()
        watching.cancel()

    asyncio.run(watch())
    assert reported == [pytest.approx(0.1), pytest.approx(0.15)]


def test_peers_of_a_large_run_are_not_silent_while_the_coordinator_is_busy() -> None:
    """With thousands of peers a ping is rare, but its answer is not waited for any less."""
    silent_at_s: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StandingLoop)
        connection = cast(HeardConnection, Silence())
        watching = asyncio.create_task(
            watch_heartbeat(
                connection, every_s=8.0, timeout_s=2.5, silent=lambda _: silent_at_s.append(round(loop.time(), 3))
            )
        )
        loop.call_later(8.1, loop.hold_up, 3.0)  # the ping may still wait behind orders that are to be sent
        await asyncio.sleep(18.0)
        watching.cancel()

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(watch())
    assert silent_at_s[:1] == [8.1 + 3.0 + 2.5]
