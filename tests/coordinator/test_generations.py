"""Generations whose placement changes: the active placement after a failure, and the orders of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chameleon_ft.config import Parallel, Recovery
from chameleon_ft.protocol.messages import PeerFailed, Stop, Switched
from chameleon_ft.recovery import DecisionContext, FailureModel
from chameleon_ft.recovery.transition import TransitionOrders
from tests.coordinator.stage import Stage, scene

# Workers 0 2 4 hold layers 0-1, workers 1 3 5 hold layers 2-3.
THREE_PIPELINES: dict[str, Any] = {
    "workers": 6,
    "parallel": Parallel(dp=3, pp=2),
    "recovery": Recovery(policy="repartition"),
}
OLD = {worker: (0, 1) if worker % 2 == 0 else (2, 3) for worker in range(6)}


def begin_transition(stage: Stage, lost: int = 1) -> dict[int, TransitionOrders]:
    """Train, lose a worker, quiesce, and return what each survivor is told of the transition."""
    stage.train(workers=6)
    stage.reap(lost)
    stage.quiesce(2, 3)
    return told(stage)


def told(stage: Stage) -> dict[int, TransitionOrders]:
    """Each live worker's orders for the newest generation's transition."""
    newest = stage.order().generation
    orders = {worker: stage.ranks[worker].begun for worker in stage.live()}
    return {
        worker: order.transition
        for worker, order in orders.items()
        if order.generation == newest and order.transition is not None
    }


def switch(stage: Stage, worker: int) -> None:
    stage.say(stage.ranks[worker], Switched(generation=stage.order().generation, moved_bytes=700, transfer_s=0.25))


def held_in(stage: Stage, worker: int) -> tuple[int, ...]:
    return stage.layers_of(worker)


@scene(**THREE_PIPELINES)
async def test_a_loss_changes_the_placement(stage: Stage) -> None:
    transitions = begin_transition(stage)
    assert transitions.keys() == {0, 2, 3, 4, 5}
    for worker, transition in transitions.items():
        assert transition.participants == (0, 2, 3, 4, 5)
        assert set(transition.keep) >= set(OLD[worker]), "nothing is dropped before the switch"
        received = {move.layer for move in transition.moves if move.destination == worker}
        assert set(held_in(stage, worker)) <= received | set(transition.keep)
    moves = {move for transition in transitions.values() for move in transition.moves}
    assert moves
    for move in moves:
        assert [worker for worker in transitions if move in transitions[worker].moves] == sorted(move[:2])


@scene(**THREE_PIPELINES)
async def test_after_the_switch_the_new_plan_continues_without_a_transition(stage: Stage) -> None:
    begin_transition(stage)
    stage.say(stage.ranks[0], PeerFailed(generation=2, peer=None, error="a collective failed"))
    stage.quiesce(3, 3)
    assert told(stage) == {}
    assert stage.order().generation == 3


DROP_REPLICA: dict[str, Any] = {"recovery": Recovery(policy="drop-replica")}


@scene(**DROP_REPLICA)
async def test_who_is_left_over_takes_part_until_the_switch(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3)
    order = stage.ranks[0].begun
    assert (order.members, order.participants, order.operations) == ((2, 3), (0, 2, 3), ())
    stage.reap(0)
    assert stage.ranks[2].last(Stop).generation == 3
    for worker in (2, 3):
        stage.quiesce(3, 3, worker, placed=1, layers=(0, 1) if worker == 2 else (2, 3))
    assert stage.order().members == (2, 3)


@scene(**DROP_REPLICA)
async def test_a_spare_is_not_needed_after_the_switch(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3)
    stage.start()
    stage.reap(0)
    assert stage.ranks[2].last(Stop).generation == 2, "training goes on"
    failure = stage.failures[-1]
    assert (failure.worker, failure.policy, failure.action) == (0, "none", "it was a spare: nothing changes")
    assert failure.rounds == 0


@scene(**DROP_REPLICA)
async def test_the_state_of_a_spare_does_not_count(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3)
    stage.start()
    stage.commit(3)
    stage.say(stage.ranks[2], PeerFailed(generation=2, peer=None, error="a collective failed"))
    # Even if it says otherwise, and is behind.
    stage.quiesce(3, 3, 0, placed=1, layers=(0, 1))
    stage.quiesce(3, 4, 2, 3)
    assert (stage.order().first_step, stage.order().members) == (4, (2, 3))


@scene(**DROP_REPLICA)
async def test_the_loss_of_a_spare_teaches_nothing_about_stalls(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3)
    stage.start()
    before = stage.coordinator.state.history.phases(looked_up=False)
    stage.reap(0)
    assert len(stage.failures) == 2
    assert stage.coordinator.state.history.phases(looked_up=False) == before


class _RecordingCache:
    """Keeps what decisions are asked for."""

    def __init__(self) -> None:
        self.asked: list[DecisionContext] = []

    def expect(self, ask: Callable[[], tuple[DecisionContext, FailureModel]]) -> None:
        self.asked.append(ask()[0])

    def look_up(self, context: DecisionContext, rate: FailureModel) -> None:
        return None

    def drop(self) -> None:
        self.asked.clear()


@scene(**THREE_PIPELINES)
async def test_after_a_transition_the_next_loss_is_prepared_for(stage: Stage) -> None:
    decisions: Any = stage.coordinator._commands.decisions
    cache = decisions._cache = _RecordingCache()
    stage.train(workers=6)
    assert [each.plan.workers for each in cache.asked] == [(0, 1, 2, 3, 4, 5)] * 3
    stage.reap(1)
    stage.quiesce(2, 3)
    stage.start()
    stage.commit(3)
    (asked,) = cache.asked
    assert (asked.plan.workers, asked.lost) == (stage.order().members, ())
    assert stage.coordinator.state.active is not None
    assert asked.plan == stage.coordinator.state.active.plan


@scene(**THREE_PIPELINES)
async def test_what_has_moved_is_recorded_once(stage: Stage) -> None:
    begin_transition(stage)
    for worker in (2, 0):
        switch(stage, worker)
    stage.start([2])
    switch(stage, 3)
    (event,) = stage.events("transition")
    assert (event["generation"], event["workers"], event["moved_bytes"], event["transfer_s"]) == (2, 5, 700, 0.25)
    assert event["planned_bytes"] > 0
    (failure,) = stage.failures
    assert failure.policy.startswith("repartition")
    assert (failure.moved_bytes, failure.transfer_s, failure.rounds) == (700, 0.25, event["rounds"])
    (decision,) = stage.events("decision")
    assert decision["chosen"] == failure.policy
