"""Losses, decisions and messages that fail while workers join."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import (
    Crashed,
    Discard,
    Hello,
    HostHello,
    PeerFailed,
    Prepare,
    Quiesced,
    Ready,
    Spawn,
    StartGeneration,
    Stop,
    Switch,
    WorkerExited,
)
from tests.coordinator.newcomers import (
    RESPAWNING,
    come,
    come_back,
    considered,
    join_from_late_host,
    lose_and_respawn,
    messages,
    until,
    watched,
)
from tests.coordinator.stage import Puppet, Stage, scene
from tests.golden import refused


class _Gone(Executor):
    """Its process has been killed."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise BrokenProcessPool("a process was terminated abruptly")


@scene(**RESPAWNING)
async def test_a_newcomer_stays_a_spare_if_the_decision_fails(stage: Stage) -> None:
    decisions: Any = stage.coordinator._commands.decisions
    decisions._executor = _Gone()
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.events("decision_failed"))
        await asyncio.sleep(100.0)
        stage.commit(3)
        assert messages(stage, "decision_failed") == [
            "worker 1 stays a spare: the decision on it failed: BrokenProcessPool: a process was terminated abruptly"
        ]
        assert stage.ended is None
        assert stage.ranks[0].count(Prepare) == 0
        # It is there when the next one is lost.
        stage.reap(0)
        stage.quiesce(3, 4)
        assert 1 in stage.order().members
    assert [event["trigger"] for event in stage.events("decision")] == ["loss", "loss"]


@scene(**RESPAWNING)
async def test_a_decision_on_newcomers_that_fails_after_a_loss_is_ignored(stage: Stage) -> None:
    decisions: Any = stage.coordinator._commands.decisions
    gone = asyncio.Event()

    async def consider(*_: object) -> None:
        await gone.wait()
        raise BrokenProcessPool("a process was terminated abruptly")

    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        decisions.consider = consider
        come(stage, 1)
        await until(lambda: stage.coordinator.state.scale_up.considering is not None)
        stage.reap(2)
        stage.quiesce(3, 3)
        stage.start()
        gone.set()
        await until(lambda: stage.coordinator.state.scale_up.considering is None)
        stage.commit(3)
    assert stage.events("decision_failed") == []
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_a_worker_that_dies_before_it_takes_part_changes_nothing(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=1))  # before it has joined
        await until(lambda: stage.host.last(Spawn).incarnations == (3,))
        rank = stage.join(1)
        stage.say(rank, Crashed(error="ConfigError: there is no such device"))
        stage.commit(3)
        assert messages(stage, "join_failed") == [
            "worker 1 was lost before it took part: exit code 1",
            "worker 1 was lost before it took part: ConfigError: there is no such device",
        ]
        assert stage.order().generation == 2
    assert len(stage.failures) == 1
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_a_worker_that_keeps_dying_is_not_restarted(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        times = [asyncio.get_running_loop().time()]
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=1))
        await until(lambda: stage.host.last(Spawn).incarnations == (3,))
        times.append(asyncio.get_running_loop().time())
        assert times[1] - times[0] >= 8.0, "twice as long as the first time"
        stage.say(stage.host, WorkerExited(worker=1, incarnation=3, exit_code=1))
        assert messages(stage, "blocklisted") == [
            "worker 1 was lost 3 times and is not taken again; see recovery.max_respawns"
        ]
        await asyncio.sleep(100.0)
        assert stage.host.last(Spawn).incarnations == (3,)
        with refused(ControlError):
            stage.say(Puppet("again"), Hello(worker=1, host="h"))
        stage.depart(stage.host)
        late = Puppet("late host")
        stage.say(late, HostHello(host="b", slots=1))
        assert late.last(Spawn).workers == (4,)
    assert [event["incarnation"] for event in stage.events("respawn")] == [2, 3]


@scene(**RESPAWNING)
async def test_the_end_of_an_earlier_incarnation_is_not_that_of_a_later_one(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        before = stage.ranks[1]
        await lose_and_respawn(stage)
        rank = come(stage, 1)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=1, exit_code=-9))
        stage.depart(before)
        stage.say(before, PeerFailed(generation=2, peer=0, error="from the past"))
        stage.say(before, Quiesced(generation=2, committed=9, reduced=False, last_vote=None, placed=0, layers=()))
        assert not rank.dropped
        assert stage.events("join_failed") == []
        assert len(stage.failures) == 1
        await considered(stage)


@scene(**RESPAWNING)
async def test_a_spare_that_is_lost_while_it_is_considered_is_not_stopped_for(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.coordinator.state.scale_up.considering is not None)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        await until(lambda: stage.coordinator.state.scale_up.considering is None)
        stage.commit(3)
    # A better plan for the others may be found meanwhile.
    prepared = [message.order.members for message in stage.ranks[0].sent if isinstance(message, Prepare)]
    assert all(1 not in members for members in prepared)
    assert [failure.action for failure in stage.failures][1:] == ["it was a spare: nothing changes"]


@scene(**RESPAWNING)
async def test_a_newcomer_that_is_lost_while_its_generation_is_prepared(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.prepare(0, 2, 3)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        assert stage.ranks[0].last(Discard) == Discard(generation=3)
        assert stage.ahead() is None
        stage.commit(3)
        assert (stage.order().generation, stage.order().members) == (2, (0, 2, 3))
    assert stage.ranks[0].count(Switch) == 0
    assert [event["trigger"] for event in stage.events("decision")] == ["loss"]
    assert [event["generation"] for event in stage.events("plan")] == [1, 2], "it has never been in force"
    assert stage.events("join") == []


@scene(**RESPAWNING)
async def test_one_of_two_newcomers_is_lost_while_their_generation_is_prepared(stage: Stage) -> None:
    late = Puppet("late host")
    async with watched(stage):
        stage.train()
        stage.say(late, HostHello(host="b", slots=2))
        for worker in (4, 5):
            stage.say(join_from_late_host(stage, worker), Ready())
        await considered(stage)
        stage.prepare(4)
        stage.say(late, WorkerExited(worker=5, incarnation=1, exit_code=-9))
        assert stage.ahead() is None
        assert (await considered(stage)).generation == 3
        stage.switch_to_the_end(3)
    (decision,) = stage.events("decision")
    assert (decision["trigger"], decision["lost"], decision["live"]) == ("join", [], 5)
    assert decision["candidates"][0]["policy"] == "stay"


@scene(**RESPAWNING)
async def test_a_loss_while_a_generation_is_prepared_does_not_hide_what_became_of_a_newcomer(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.reap(2)
        assert {stage.ranks[worker].last(Stop).generation for worker in (0, 1, 3)} == {4}, "above that one, too"
        stage.quiesce(4, 3, 0, 1, 3)
        order = stage.order()
        assert 2 not in order.participants
        stage.start()
    (record,) = stage.events("join")
    placed, spare = ([1], []) if 1 in order.members else ([], [1])
    assert (record["workers"], record["spares"], record["generation"]) == (placed, spare, order.generation)
    loss = stage.events("failure")[-1]
    assert (loss["worker"], loss["generation"]) == (2, order.generation)
    assert record["policy"] == loss["policy"] == stage.events("decision")[-1]["chosen"]
    assert 0.0 <= record["stop_s"] <= record["stall_s"]


@scene(**RESPAWNING)
async def test_a_message_that_fails_before_the_switch_does_not_hide_what_became_of_a_newcomer(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.say(stage.ranks[0], PeerFailed(generation=2, peer=None, error="a collective failed"))
        stage.quiesce(4, 3)
        assert 1 in stage.order().members
        stage.start()
        stage.commit(3)
        stage.reap(0)
        stage.quiesce(5, 4)
        stage.start()
    (record,) = stage.events("join")
    assert (record["workers"], record["spares"], record["generation"]) == ([1], [], 4)
    assert len(stage.failures) == 2


@scene(**RESPAWNING)
async def test_a_newcomer_that_dies_while_its_layers_arrive(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        before = {worker: stage.layers_of(worker) for worker in (0, 2, 3)}
        stage.switch(3)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        stage.quiesce(5, 4, 0, 2, 3)
        order = stage.order()
        assert (order.generation, order.members, order.first_step) == (5, (0, 2, 3), 4)
        assert order.transition is None, "the placement is that from before"
        assert {worker: stage.layers_of(worker) for worker in (0, 2, 3)} == before
        stage.start()
        stage.commit(4)
    assert [(failure.worker, failure.policy) for failure in stage.failures][1:] == [(1, "again")]
    assert stage.events("join") == []
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_what_a_newcomer_has_received_is_not_sent_again(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        before = {worker: stage.layers_of(worker) for worker in (0, 2, 3)}
        stage.switch(3)
        got = stage.layers_of(1)
        assert got
        stage.say(stage.ranks[0], PeerFailed(generation=3, peer=None, error="a collective failed"))
        for worker in range(4):
            layers = got[:1] if worker == 1 else before[worker]
            stage.quiesce(5, 4, worker, placed=2, layers=layers)
        order = orders_to(stage, 1)[-1]
        assert (order.generation, 1 in order.members) == (5, True)
        assert order.transition is not None
        assert order.transition.keep == got[:1]
        assert got[0] not in {layer for _, _, to, layer, _ in order.transition.moves if to == 1}
        stage.start()
    assert [record["workers"] for record in stage.events("join")] == [[1]]


def orders_to(stage: Stage, worker: int) -> list[StartGeneration]:
    """The orders of a worker that were not prepared."""
    return [message for message in stage.ranks[worker].sent if isinstance(message, StartGeneration)]


@scene(**RESPAWNING)
async def test_what_a_newcomer_has_received_counts_only_if_it_is_of_the_same_step(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        before = {worker: stage.layers_of(worker) for worker in (0, 2, 3)}
        stage.switch(3)
        stage.commit(4)
        stage.say(stage.ranks[0], PeerFailed(generation=3, peer=None, error="a collective failed"))
        for worker in (0, 2, 3):
            stage.quiesce(5, 5, worker, placed=2, layers=before[worker])
        stage.quiesce(5, 4, 1, placed=2, layers=(0,))
        transition = orders_to(stage, 1)[-1].transition
        assert transition is not None
        assert transition.keep == ()


@scene(**RESPAWNING)
async def test_a_worker_is_lost_before_all_have_switched(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.prepare()
        stage.commit(3, 0, switch=True)
        assert stage.order().generation == 3
        stage.reap(3)
        assert stage.ranks[0].last(Stop).generation == 5
        stage.quiesce(5, 4, 0, 1, placed=2)
        stage.quiesce(5, 3, 2, placed=2, reduced=True)
        order = stage.order()
        assert (order.first_step, order.roll_forward is not None) == (4, True)
        assert 3 not in order.members
        stage.start()
        stage.commit(3)  # late
        assert stage.ranks[0].last(Stop).generation == 5
