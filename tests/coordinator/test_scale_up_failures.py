"""Losses, decisions and messages that fail while workers join."""

from __future__ import annotations

import asyncio
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from chameleon_ft.protocol.messages import HostHello, PeerFailed, Prepare, Ready, StartGeneration, Stop, WorkerExited
from chameleon_ft.protocol.parts import Member
from chameleon_ft.recovery.generation import WorkerOrders
from tests.coordinator.newcomers import (
    RESPAWNING,
    come,
    come_back,
    considered,
    join_from_late_host,
    lose_and_respawn,
    until,
    watched,
)
from tests.coordinator.stage import Puppet, Stage, scene


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
async def test_a_spare_that_is_lost_while_it_is_considered_is_not_stopped_for(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.coordinator.state.scale_up.considering is not None)
        stage.say(stage.host, WorkerExited(member=Member(1, 2), exit_code=-9))
        await until(lambda: stage.coordinator.state.scale_up.considering is None)
        stage.commit(3)
    # A better plan for the others may be found meanwhile.
    prepared = [message.orders.members for message in stage.ranks[0].sent if isinstance(message, Prepare)]
    assert all(1 not in members for members in prepared)
    assert [failure.action for failure in stage.failures][1:] == ["it was a spare: nothing changes"]


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
        stage.say(late, WorkerExited(member=Member(5, 1), exit_code=-9))
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
        stage.say(stage.host, WorkerExited(member=Member(1, 2), exit_code=-9))
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
        assert got[0] not in {move.layer for move in order.transition.moves if move.destination == 1}
        stage.start()
    assert [record["workers"] for record in stage.events("join")] == [[1]]


def orders_to(stage: Stage, worker: int) -> list[WorkerOrders]:
    """The orders of a worker that were not prepared."""
    return [message.orders for message in stage.ranks[worker].sent if isinstance(message, StartGeneration)]


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
