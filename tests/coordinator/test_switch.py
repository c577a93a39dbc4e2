"""The plans that a run switches to: nothing is lost on the way, and all fits."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from chameleon_ft.coordinator.decisions.planner import decide_on_switch, plans_to
from chameleon_ft.cost.memory import program_memory
from chameleon_ft.plan import Placement, data_pipeline_plan
from chameleon_ft.recovery import POLICIES, STAY, Decision, DecisionContext, Proposal, decide
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.recovery.scoring import measure
from chameleon_ft.transfer import pull_s
from tests.examples import examples
from tests.recovery.contexts import after, arrived, context, contexts, layer, rate_of

HORIZON_S = 1e6


def leaving(now: DecisionContext, *workers: int) -> DecisionContext:
    """The context once these workers are to leave."""
    return replace(after(now, *workers), leaving=tuple(now.costs.cluster.worker(worker) for worker in workers))


def plans_for(now: DecisionContext, policy: str, *, migrates: bool = True) -> tuple[GenerationSpec, ...]:
    decision, plans = decide_on_switch(now, policy, rate_of(HORIZON_S, now), migrates=migrates)
    assert pickle.loads(pickle.dumps(plans)) == plans, "it is made in another process"
    assert decision == decide(replace(now, migrates=migrates), policy, rate_of(HORIZON_S, now))
    assert plans or decision.chosen is None or decision.chosen.policy == STAY or decision.chosen.from_checkpoint
    return plans


def layers_by_worker(placement: Placement) -> dict[int, set[int]]:
    return {worker: {layer for own in ranges for layer in own} for worker, ranges in placement.ranges.items()}


@settings(max_examples=examples(60), deadline=None)
@given(now=contexts(intact=True), policy=st.sampled_from(sorted(POLICIES)), migrates=st.booleans(), data=st.data())
def test_every_worker_holds_its_layers_before_it_needs_them(
    now: DecisionContext, policy: str, migrates: bool, data: st.DataObject
) -> None:
    held = now.plan.placement
    gone = data.draw(st.sets(st.sampled_from(now.live), max_size=min(2, len(now.live) - 1)))
    now = leaving(now, *gone)
    plans = plans_for(now, policy, migrates=migrates)
    if not plans:
        return
    *first, final = plans
    assert not gone.intersection(final.plan.workers)
    assert final.migration is None
    assert {plan.load for plan in plans} == {"keep"}
    wanted = layers_by_worker(final.plan.placement)
    if not first:
        messages = () if final.transition is None else final.transition.transfer.messages
        holds = arrived(held, messages)
        assert all(own <= set(holds[worker]) for worker, own in wanted.items())
        return
    (migration,) = first
    assert migrates
    assert migration.migration is not None
    assert final.transition is None
    assert migration.plan.routes == now.plan.routes, "training goes on as before"
    holders = layers_by_worker(migration.plan.placement)
    assert {worker: set(own) for worker, own in arrived(held, migration.migration.messages).items()} == holders
    assert all(own <= holders[worker] for worker, own in wanted.items())
    assert migration.program is not None
    memory = program_memory(migration.program, migration.plan.placement, now.costs.workload)
    for worker in {message.destination for message in migration.migration.messages}:
        capacity = now.costs.cluster.worker(worker).memory_bytes
        assert capacity is None or memory[worker].peak_bytes <= capacity


@pytest.mark.parametrize(("memory_bytes", "migrates"), [(None, True), (1_000, True), (799, False)])
def test_layers_move_before_the_plan_trains_where_memory_does_not_hold_them_beside(
    memory_bytes: int | None, migrates: bool
) -> None:
    # Two workers exchange their layers: 400 bytes each with gradients, of which 300 move.
    now = context(dp=2, pp=2, layers=(layer(100), layer(100)), memory_bytes=memory_bytes)
    exchanged = data_pipeline_plan(layer_costs=[1.0, 1.0], dp=2, pp=2, micro_batches=8, workers=(1, 0, 2, 3))
    chosen, draft = measure(Proposal(name="exchange", plan=exchanged), now)
    assert draft is not None
    course = draft.course()
    decision = Decision(horizon_s=1.0, phases=now.phases, candidates=(chosen,), chosen=chosen, course=course)
    plans = plans_to(decision, now, migrates=True)
    assert [plan.migration is not None for plan in plans] == ([True, False] if migrates else [False])
    assert (plans[-1].transition is None) == migrates
    assert plans[-1].predicted_stall_s == (0.0 if migrates else chosen.transfer_s)
    assert plans_to(decision, now, migrates=False)[0].transition is not None


@settings(max_examples=examples(30), deadline=None)
@given(now=contexts(intact=True))
def test_a_vote_waits_for_layers_only_if_another_step_would_cost_more(now: DecisionContext) -> None:
    plans = plans_for(now, "repartition")
    for migrating, following in pairwise(plans):
        if migrating.migration is None:
            assert migrating.hold_s == 0
            continue
        moves_s = pull_s(migrating.migration.messages, now.senders) * now.migration_factor
        assert migrating.predicted_step_s is not None
        if following.predicted_step_s is not None:
            gain_s = migrating.predicted_step_s - following.predicted_step_s
            # Otherwise it waits if the layers would slow down more than one step; see `pace_of`.
            assert (
                migrating.hold_s == pytest.approx(gain_s) if moves_s < gain_s else migrating.hold_s in (0, 2 * moves_s)
            )
            event(f"it waits: {migrating.hold_s > 0}")


@pytest.mark.parametrize(("memory_bytes", "fits"), [(None, True), (140, True), (139, False)])
def test_what_would_be_read_from_a_checkpoint_moves_before_the_plan_trains(
    memory_bytes: int | None, fits: bool
) -> None:
    # Worker 1 holds 80 bytes, and receives two layers of 30 bytes from worker 0.
    now = leaving(context(dp=1, pp=3, memory_bytes=memory_bytes), 0)
    decision = decide(now, "restart", rate_of(HORIZON_S, now))
    assert decision.chosen is not None
    assert decision.chosen.from_checkpoint
    plans = plans_for(now, "restart", migrates=False)
    assert len(plans) == fits
    for plan in plans:
        assert plan.load == "keep"
        assert plan.migration is None
        assert plan.transition is not None
        assert plan.predicted_stall_s == pytest.approx(0.6), "60 bytes at 100 bytes per second"


def test_a_worker_that_leaves_sends_layers_of_which_only_it_has_any() -> None:
    first, final = plans_for(leaving(context(dp=1, pp=3), 1), "repartition")
    assert first.migration is not None
    moved = {layer: message.source for message in first.migration.messages for layer in message.layers}
    assert {layer for layer, source in moved.items() if source == 1} == {2, 3}
    assert final.plan.workers == (0, 2)
