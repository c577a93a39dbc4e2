"""Layers that move while another plan trains: the plan, its memory, its time, and its place in a decision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.step import estimate_parts
from chameleon_ft.plan import LayerRange, Placement, data_pipeline_plan
from chameleon_ft.recovery import STAY, Candidate, DecisionContext, Proposal, decide
from chameleon_ft.recovery.context import CourseDraft
from chameleon_ft.recovery.migration import (
    Wave,
    migration_of,
    pace_of,
    present_draft,
    with_migrations,
    with_shadow_holders,
    without_shadow_holders,
)
from chameleon_ft.recovery.scoring import measure
from chameleon_ft.schedule import best_program, check_program
from chameleon_ft.schedule.best import program_of
from chameleon_ft.transfer import Message, pull_s, sums_s, transfer_to
from tests.examples import examples
from tests.recovery.contexts import after, context, contexts, layer, rate_of


def test_receivers_are_further_holders_and_routes_stay() -> None:
    now = context(dp=2, pp=2, spares=1)  # workers 0 and 2 hold layers 0 and 1, workers 1 and 3 layers 2 and 3
    whole = LayerRange(0, 4)
    target = Placement(4, {0: (LayerRange(0, 1), LayerRange(3, 4)), 1: (LayerRange(1, 2),), 4: (whole,)})
    migrating = with_shadow_holders(now.plan, target)
    assert migrating.routes == now.plan.routes
    assert dict(migrating.placement.ranges) == {
        0: (LayerRange(0, 2), LayerRange(3, 4)),
        1: (LayerRange(1, 4),),
        2: (LayerRange(0, 2),),
        3: (LayerRange(2, 4),),
        4: (whole,),
    }


def test_the_seconds_of_a_migration_by_hand() -> None:
    workers = tuple(Worker(number, f"host {number // 2}") for number in range(4))
    cluster = Cluster(workers, Link(0.25, 100.0), Link(0.5, 50.0))
    two, one = LayerRange(0, 2), LayerRange(2, 3)
    # Worker 1 pulls two layers of 100 bytes in all from its own host: 1 s on the wire, and four messages of 0.25 s.
    near = Message(0, 1, two, 100)
    assert pull_s([near], cluster) == 2.0
    # Worker 2 pulls from both other hosts' workers, one layer after the other.
    far = Message(0, 2, one, 100)
    assert pull_s([near, far], cluster) == 3.0
    assert pull_s([near, far, Message(3, 2, two, 300)], cluster) == 3.0 + (3.0 + 1.0)
    # Worker 0 sends to three workers: what it sends shares its links.
    assert pull_s([near, far, Message(0, 3, one, 100)], cluster) == 1.0 + 2.0 + 2.0
    assert pull_s([], cluster) == 0.0


def test_the_seconds_in_which_sums_are_sent_by_hand() -> None:
    now = context(dp=2, pp=1, layers=(layer(10), layer(20), layer(30)))
    workers = tuple(Worker(number, f"host {number // 2}") for number in range(4))
    cluster = Cluster(workers, Link(0.25, 100.0), Link(0.5, 50.0))
    near, far = Message(0, 1, LayerRange(0, 2), 900), Message(0, 2, LayerRange(2, 3), 900)
    # Gradients of 30 bytes, at 100 bytes/s in the host and at 50 to the other; what worker 0 sends shares its links.
    assert sums_s([near], now.costs.workload, cluster) == pytest.approx(0.3 + 2 * 0.25)
    assert sums_s([far], now.costs.workload, cluster) == pytest.approx(0.6 + 0.5)
    two = Message(3, 1, LayerRange(2, 3), 900)
    assert sums_s([near, far, two], now.costs.workload, cluster) == pytest.approx(0.3 + 0.5 + 0.6 + 0.5)
    assert sums_s([], now.costs.workload, cluster) == 0.0


def test_without_its_shadow_holders_a_placement_is_the_one_in_force() -> None:
    now = context(dp=2, pp=2, spares=1)
    target = Placement(4, {0: (LayerRange(0, 1), LayerRange(3, 4)), 1: (LayerRange(1, 4),), 4: (LayerRange(0, 4),)})
    layers = now.costs.workload.layers
    transfer = transfer_to(now.plan.placement, target, live=now.costs.cluster.hosts, layers=layers)
    migrating = with_shadow_holders(now.plan, target).placement
    assert without_shadow_holders(migrating, transfer) == now.plan.placement


def migrating_to(target: Placement, now: DecisionContext) -> CourseDraft:
    """The plan under which layers move from the plan in force to a placement."""
    layers = now.costs.workload.layers
    return migration_of(present_draft(now), transfer_to(now.placement, target, live=now.live, layers=layers), now.costs)


def test_a_shadow_holder_needs_state_and_gradients_beside_its_own_step() -> None:
    now = context(dp=2, pp=2, spares=1)
    target = Placement(4, {0: (LayerRange(0, 3),), 1: (LayerRange(2, 4),), 4: (LayerRange(1, 2),)})
    assert migrating_to(now.plan.placement, now).plan == now.plan
    # Each layer has 10 bytes of parameters and gradients, and 20 of optimizer state.
    own = dict.fromkeys(range(4), 0)
    for memory_bytes in range(1, 500):
        workers = tuple(replace(each, memory_bytes=memory_bytes) for each in now.costs.cluster.workers)
        costs = replace(now.costs, cluster=replace(now.costs.cluster, workers=workers))
        missing = migrating_to(now.plan.placement, now).estimate.over_capacity(costs)
        own |= {worker: memory_bytes + lacks for worker, lacks in missing.items()}
        more = migrating_to(target, now).estimate.over_capacity(costs)
        for worker, received in ((0, 40), (1, 0), (2, 0), (3, 0)):
            assert max(0, more.get(worker, 0)) == max(0, own[worker] + received - memory_bytes)
        assert more.get(4, 0) == max(0, 40 - memory_bytes)


@settings(max_examples=examples(25), deadline=None)
@given(now=contexts(intact=True), data=st.data())
def test_a_migrating_plan_runs_the_program_of_the_plan_in_force(now: DecisionContext, data: st.DataObject) -> None:
    num_layers = now.plan.placement.num_layers
    held = {
        worker: (LayerRange(start, data.draw(st.integers(start + 1, num_layers))),)
        for worker in now.live
        if (start := data.draw(st.integers(0, num_layers - 1))) >= 0
    }
    found = migrating_to(Placement(num_layers, held), now)
    program = program_of(found.plan, found.parts)
    check_program(program, found.plan)
    alone = best_program(now.plan, now.costs, in_flight_limits=now.in_flight_limits).program
    assert {worker: own for worker, own in program.operations.items() if own} == dict(alone.operations)
    # Shadow holders are in no reduction; the sums are sent to them after it.
    assert found.transfer is not None
    sent_s = sums_s(found.transfer.messages, now.costs.workload, now.costs.cluster)
    assert found.estimate.step_s == estimate_parts(now.plan, found.parts, now.costs).step_s + sent_s


def by_name(now: DecisionContext, horizon_s: float = 1e5) -> dict[str, Candidate]:
    decision = decide(now, "chameleon", rate_of(horizon_s, now))
    return {each.policy: each for each in decision.candidates if each.feasible}


def test_beside_training_nothing_stops_and_layers_move_at_the_old_rate() -> None:
    stopping = replace(context(dp=2, pp=2, spares=2, share=8), repeat_s=0.0)
    before, now = by_name(stopping), by_name(replace(stopping, migrates=True))
    assert before.keys() == now.keys()
    assert now[STAY] == before[STAY]
    moved = [each for each in now.values() if each.moved_bytes]
    assert moved
    for each in moved:
        assert (each.stall_s, each.transfer_s) == (0.0, 0.0)
        assert each.step_s == before[each.policy].step_s
        assert each.migration_s > 0
        assert now[STAY].step_s is not None
        assert each.migration_step_s >= now[STAY].step_s
        # After the switch that takes newcomers in, layers move for at least a step.
        assert each.needs_switch
        assert each.delay_s == 0, "the step under way is not longer"
        assert each.migrating_s == each.migration_step_s * math.ceil(each.migration_s / each.migration_step_s) > 0


def test_after_a_loss_rerouting_takes_over_and_layers_move_then() -> None:
    lost = after(context(dp=3, pp=2, share=8), 1)
    before, now = by_name(lost), by_name(replace(lost, migrates=True))
    at_once_s = lost.phases.total_s + lost.repeat_s
    assert now["reroute"] == before["reroute"]
    for name, each in now.items():
        if each.moved_bytes and not each.from_checkpoint:
            assert (each.stall_s, each.transfer_s) == (at_once_s, 0.0)
            assert before[name].stall_s == at_once_s + (before[name].transfer_s or 0.0)
            assert now["reroute"].step_s is not None
            assert each.migration_step_s >= now["reroute"].step_s
            assert (each.needs_switch, each.migrating_s) == (False, each.migration_s)
            assert each.delay_s == pytest.approx(each.migration_step_s - now["reroute"].step_s)
            assert before[name].delay_s == 0
            # No more is lost by a migration than by a stop for as long.
            assert each.samples > before[name].samples
    assert now["repartition"].migration_s > 0


def test_the_migration_of_a_joined_worker_by_hand() -> None:
    # One worker with four layers; a second one joins and receives all of them, 30 bytes of state each.
    joined = context(dp=1, pp=1, spares=1, share=8, layers=(layer(10),) * 4)
    now = replace(joined, migrates=True, step_factor=1.25, transfer_factor=2.0)
    _, moved = decide(now, "repartition", rate_of(1e6, now)).candidates
    # 120 bytes at 100 bytes/s, over links half as fast as they should be, in steps that are a fifth vote and update.
    assert moved.migration_s == pytest.approx(1.2 * 2.0 * 1.25)
    # 8 micro-batches of 4 layers of 3 s; then the sums are sent, 10 bytes for each layer.
    assert moved.migration_step_s == pytest.approx((8 * 4 * 3.0 + 4 * 10 / 100.0) * 1.25)


@pytest.mark.parametrize(("micro_batches", "at_rest"), [(1, True), (4, False)])
def test_layers_move_at_rest_if_they_would_slow_steps_down_for_longer(*, micro_batches: int, at_rest: bool) -> None:
    # As above, with state of 3,000 bytes and gradients of 1,000 bytes for each layer, which take 30 and 10 s.
    now = context(dp=1, pp=1, spares=1, share=micro_batches, layers=(layer(1000),) * 4)
    moved = migrating_to(Placement(4, {0: (LayerRange(0, 4),), 1: (LayerRange(0, 4),)}), now)
    pace = pace_of(Wave(moved, None), now)
    assert pace.moves_s == pytest.approx(120.0)
    step_s = micro_batches * 4 * 3.0
    if at_rest:
        # Beside steps of 12 s: four steps, each 18 s longer for a layer, that tell 10, 20, 30 and 40 s of sums.
        assert 120.0 - step_s + 40.0 < 100.0 + 4 * 18.0
        assert (pace.seconds, pace.step_s) == pytest.approx((160.0, 160.0))
        assert pace.hold_s > pace.moves_s
    else:
        # Beside steps of 48 s: four steps with a layer each.
        assert 120.0 - step_s + 40.0 > 100.0
        assert (pace.seconds, pace.step_s, pace.hold_s) == pytest.approx((120.0, step_s + 40.0, 0.0))


def test_layers_that_do_not_fit_beside_training_move_in_waves_or_stop_it() -> None:
    # Two stages of a layer change places; with gradients, each worker needs 400 bytes for what it receives.
    now = context(dp=2, pp=2, layers=(layer(100), layer(100)))
    exchanged = data_pipeline_plan(layer_costs=[1.0, 1.0], dp=2, pp=2, micro_batches=8, workers=(1, 0, 2, 3))
    stay = Proposal(name=STAY, plan=now.plan, in_flight_limits=now.in_flight_limits)
    proposals = stay, Proposal(name="exchange", plan=exchanged)
    needed = max(measure(stay, now)[0].peak_bytes or 0, 0) + 400
    found = []
    for memory_bytes in (700, needed - 1, needed, None):
        workers = tuple(replace(each, memory_bytes=memory_bytes) for each in now.costs.cluster.workers)
        limited = replace(now, costs=replace(now.costs, cluster=replace(now.costs.cluster, workers=workers)))
        (first, _), (moved, _) = with_migrations([measure(each, limited) for each in proposals], limited)
        assert (first.stall_s, first.migration_s) == (0.0, 0.0)
        found.append((moved.stall_s, moved.transfer_s, moved.waves))
        assert (moved.migration_s == 3.0) == (moved.waves == 1)
    stops_s = 3.0 + now.phases.total_s + now.repeat_s
    assert found == [(stops_s, 3.0, 0), (0.0, 0.0, 2), (0.0, 0.0, 1), (0.0, 0.0, 1)]


def test_with_nothing_that_stays_in_place_layers_move_as_before() -> None:
    now = after(context(dp=2, pp=2), 0)
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=1, pp=3, micro_batches=8, workers=(1, 2, 3))
    measured = [measure(Proposal(name="repartition", plan=plan), now)]
    assert with_migrations(measured, now) == measured
