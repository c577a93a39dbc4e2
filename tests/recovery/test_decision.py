"""Decisions are the best of the proposals, can be run, fit, and have the predicted figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.step import estimate_step, total_work_bound_s
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.recovery import (
    POLICIES,
    STAY,
    Candidate,
    DecisionContext,
    FailureModel,
    Proposal,
    decide,
    repartition,
)
from chameleon_ft.recovery.decision import prospect_of
from chameleon_ft.recovery.scoring import best_of, measure
from chameleon_ft.recovery.transition import placement_of
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import SearchResult, find_plan
from tests.examples import examples
from tests.golden import refused
from tests.recovery.contexts import after, context, contexts, layer, rate_of
from tests.recovery.courses import check_course

horizons_s = st.sampled_from([1.0, 6.0, 30.0, 1e4])


@settings(max_examples=examples(60), deadline=None)
@given(
    now=contexts(),
    policy=st.sampled_from(sorted(POLICIES)),
    horizon_s=horizons_s,
    host_failure_fraction=st.sampled_from([0.0, 0.25, 1.0]),
)
def test_what_is_chosen_is_best_and_can_be_run(
    now: DecisionContext, policy: str, horizon_s: float, host_failure_fraction: float
) -> None:
    rate = rate_of(horizon_s, now, host_failure_fraction=host_failure_fraction)
    decision = decide(now, policy, rate)

    assert decision.horizon_s == pytest.approx(horizon_s)
    names = [each.policy for each in decision.candidates]
    assert names
    assert len(set(names)) == len(names)
    samples = now.costs.workload.samples
    hosts = len({worker.host for worker in now.costs.cluster.workers})
    gap = rate.gap(len(now.live), after_incident=bool(now.lost))
    feasible = [each for each in decision.candidates if each.feasible]
    reference_step_s = total_work_bound_s(now.costs) * now.step_factor
    elapsed_s = 0.0 if now.has_checkpoints else rate.worker_s / len(now.live)
    for each in decision.candidates:
        assert each.feasible == (each.reason is None)
        if each.feasible:
            assert each.stall_s is not None
            assert each.step_s is not None
            assert each.host_single_points_of_failure == 0 or hosts > 1
            assert 0 <= each.fatal_share <= 1
            # A checkpoint after every step: no more than one is done again.
            min_s = each.fatal_share * (now.restart_cost_s + elapsed_s)
            assert min_s * (1 - 1e-9) <= each.return_s <= min_s + each.step_s
            trained = gap.left_after(each.stall_s) / each.step_s - each.return_s / reference_step_s
            assert each.samples == pytest.approx(samples * trained, rel=1e-9)
        else:
            assert each.samples == 0
    if not feasible:
        assert decision.chosen is None
        assert decision.course is None
        return
    assert decision.chosen in feasible
    assert decision.chosen.samples == pytest.approx(max(each.samples for each in feasible), rel=1e-9)
    check_course(decision, now)


@settings(max_examples=examples(40), deadline=None)
@given(now=contexts(), horizon_s=horizons_s)
def test_chameleon_is_never_worse_than_what_it_is_made_of(now: DecisionContext, horizon_s: float) -> None:
    rate = rate_of(horizon_s, now)
    best = decide(now, "chameleon", rate)
    for policy in ("reroute", "repair", "repartition"):
        one = decide(now, policy, rate)
        if one.chosen is not None:
            assert best.chosen is not None
            assert best.chosen.samples >= one.chosen.samples - abs(one.chosen.samples) * 1e-9


@settings(max_examples=examples(20), deadline=None)
@given(now=contexts(), policy=st.sampled_from(sorted(POLICIES)))
def test_the_same_is_decided_again(now: DecisionContext, policy: str) -> None:
    rate = rate_of(100.0, now)
    assert decide(now, policy, rate) == decide(now, policy, rate)


def candidate(samples: float, moved_bytes: int, *, reason: str | None = None) -> Candidate:
    return Candidate(policy="any", samples=samples, moved_bytes=moved_bytes, reason=reason)


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([candidate(1.0, 0), candidate(2.0, 9)], 1),
        ([candidate(2.0, 9), candidate(2.0, 3)], 1),
        ([candidate(2.0, 3), candidate(2.0, 3)], 0),
        # Rounding does not decide.
        ([candidate(2.0 + 1e-12, 9), candidate(2.0, 3)], 1),
        ([candidate(0.0, 9), candidate(0.0, 3)], 1),
        # A return to a checkpoint may be expected to cost more than is trained.
        ([candidate(-2.0, 3), candidate(-1.0, 9)], 1),
        ([candidate(-2.0 - 1e-12, 3), candidate(-2.0, 9)], 0),
        ([candidate(2.0, 3, reason="no"), candidate(1.0, 3)], 1),
        ([candidate(2.0, 3, reason="no")], None),
    ],
)
def test_of_equals_that_which_moves_least_and_then_the_first(candidates: list[Candidate], best: int | None) -> None:
    now = context(dp=2, pp=1)
    assert best_of(candidates, prospect_of(now, rate_of(1.0, now))) == best


def chosen(now: DecisionContext, horizon_s: float) -> str | None:
    decision = decide(now, "chameleon", rate_of(horizon_s, now))
    return None if decision.chosen is None else decision.chosen.policy


def test_weights_move_when_failures_are_rare_and_stay_when_they_are_frequent() -> None:
    now = after(context(dp=3, pp=2, share=8, layers=(layer(100),) * 8), 1)
    # Nothing can be trained before the next failure, whatever is done: then nothing moves.
    assert [chosen(now, horizon_s) for horizon_s in (1.0, 20.0, 1e5)] == ["reroute", "reroute", "repartition"]


def test_without_a_checkpoint_no_worker_becomes_the_last_holder_of_a_layer_if_that_can_be() -> None:
    # To reduce gradients takes so long that one pipeline of all workers is the fastest.
    layers = (replace(layer(100_000), param_bytes=100, optimizer_bytes=200),) * 6
    now = after(context(dp=3, pp=2, share=8, layers=layers), 1)
    rate = rate_of(1e6, now)
    alone = decide(now, "chameleon", rate)
    assert alone.chosen is not None
    assert alone.chosen.worker_single_points_of_failure == 5
    safe = decide(replace(now, has_checkpoints=False), "chameleon", rate)
    assert safe.chosen is not None
    assert safe.chosen.worker_single_points_of_failure == 0
    assert safe.chosen.samples < alone.chosen.samples
    # Nothing else can be done any more: it is chosen all the same.
    last = decide(replace(after(now, 2, 3), has_checkpoints=False), "reroute", rate)
    assert last.chosen is not None
    assert last.chosen.worker_single_points_of_failure


def on_hosts_by_stage(*, restart_cost_s: float, has_checkpoints: bool = True) -> DecisionContext:
    """Two hosts of two workers, a stage each: gradients are reduced within hosts, and slow links between them."""
    now = context(dp=2, pp=2, share=8, layers=(layer(1_000),) * 4, link=Link(0.0, 1e4))
    workers = tuple(Worker(number, f"host {number % 2}") for number in range(4))
    assert [now.plan.placement.ranges_of(number) for number in (0, 2)] == [(LayerRange(0, 2),)] * 2
    cluster = Cluster(workers, Link(0.0, 1e4), Link(0.0, 300.0))
    costs = CostModel(now.costs.workload, cluster)
    return replace(now, costs=costs, restart_cost_s=restart_cost_s, has_checkpoints=has_checkpoints)


@pytest.mark.parametrize(
    ("host_failure_fraction", "restart_cost_s", "has_checkpoints", "host_single_points_of_failure"),
    [
        # Hosts do not fail; they do, but to go back is short; it is long; there is nothing to go back to.
        (0.0, 9e5, True, 2),
        (0.5, 1.0, True, 2),
        (0.5, 9e5, True, 0),
        (0.5, 1.0, False, 0),
        (0.0, 1.0, False, 2),
    ],
)
def test_all_holders_of_a_layer_share_a_host_if_that_pays(
    host_failure_fraction: float, restart_cost_s: float, has_checkpoints: bool, host_single_points_of_failure: int
) -> None:
    now = on_hosts_by_stage(restart_cost_s=restart_cost_s, has_checkpoints=has_checkpoints)
    decision = decide(now, "repartition", rate_of(1e6, now, host_failure_fraction=host_failure_fraction))
    assert {each.host_single_points_of_failure for each in decision.candidates if each.feasible} >= {0, 2}
    assert decision.chosen is not None
    assert decision.chosen.host_single_points_of_failure == host_single_points_of_failure


def test_a_return_to_a_checkpoint_that_is_to_be_expected_counts() -> None:
    now = after(context(dp=2, pp=2), 0)
    rate = rate_of(1000.0, now)
    (cheap,) = decide(replace(now, restart_cost_s=0.0), "reroute", rate).candidates
    (dear,) = decide(now, "reroute", rate).candidates
    assert cheap.worker_single_points_of_failure == dear.worker_single_points_of_failure == 1
    assert dear.step_s is not None
    # One of three workers is the last holder of a layer, and the first failure mostly takes one worker.
    assert 1 / 3 < dear.fatal_share < 1 / 2
    cost = now.costs.workload.samples * dear.fatal_share * now.restart_cost_s / total_work_bound_s(now.costs)
    assert dear.samples == pytest.approx(cheap.samples - cost)


def test_more_copies_are_kept_if_losses_come_together() -> None:
    # To reduce gradients takes so long that one pipeline of all workers is the fastest.
    layers = (replace(layer(30_000), param_bytes=100, optimizer_bytes=200),) * 8
    now = replace(after(context(dp=4, pp=2, share=8, layers=layers), 1), restart_cost_s=5e3)
    rate = rate_of(2_000.0, now)
    fewest = []
    for failures in (replace(rate, failures=60), replace(rate, failures=60, together={3: 20})):
        failures = replace(failures, worker_s=failures.incidents * rate.worker_mtbf_s)
        course = decide(now, "chameleon", failures).course
        assert course is not None
        placement = course.plan.placement
        fewest.append(min(len(placement.holders(number)) for number in range(8)))

    assert fewest[0] < fewest[-1]
    assert fewest[-1] > 3, "three are lost together"
    rare = decide(now, "chameleon", rate_of(1e9, now)).course
    assert rare is not None
    assert any(len(rare.plan.placement.holders(number)) == 1 for number in range(8)), "the fastest plan has one copy"


@pytest.mark.parametrize("salvages", [False, True])
def test_where_losses_are_frequent_and_steps_are_completed_plans_with_more_holders_are_proposed(salvages: bool) -> None:
    # To reduce gradients takes a while, so few pipelines are the fastest.
    layers = (replace(layer(200), param_bytes=100, optimizer_bytes=200),) * 12
    now = replace(after(context(dp=4, pp=3, share=8, layers=layers), 1), restart_cost_s=0.0, salvages=salvages)
    step_s = find_plan(now.costs, effort=now.effort).best.step_s
    fewest: list[int] = []
    proposed: list[int] = []
    for steps in (1e9, 1.0):
        rate = rate_of(steps * step_s, now)
        decision = decide(now, "repartition", rate)
        assert decision.course is not None
        fewest.append(decision.course.plan.placement.fewest_holders)
        found = repartition.search(now, rate.horizon_s(len(now.live)))
        assert isinstance(found, SearchResult)
        plans = (found.best, *found.alternatives)
        proposed.append(max(each.plan.placement.fewest_holders for each in plans))
    if salvages:
        assert fewest[1] > fewest[0]
        assert proposed[1] > proposed[0]
    else:
        assert fewest[0] == fewest[1]
        assert proposed[0] == proposed[1]


def test_layers_that_no_worker_holds_are_a_reason() -> None:
    now = replace(after(context(dp=2, pp=2), 0, 2), has_checkpoints=False)
    decision = decide(now, "chameleon", rate_of(1e6, now))
    assert decision.chosen is None
    assert decision.course is None
    assert {each.policy for each in decision.candidates} == {"reroute", "repair", "repartition"}
    assert all(each.reason == decision.candidates[0].reason for each in decision.candidates)
    assert "no live worker holds layers 0-1" in str(decision.candidates[0].reason)
    assert decide(now, "restart", rate_of(1e6, now)).chosen is not None


def test_gradients_are_reduced_while_the_program_still_runs() -> None:
    now = context(dp=1, pp=2, share=2, layers=(layer(100),) * 2)
    whole, first, second = LayerRange(0, 2), LayerRange(0, 1), LayerRange(1, 2)
    # Both workers have the second layer's gradients before worker 0 is done with the first layer.
    plan = Plan(
        Placement(2, {0: (whole,), 1: (second,)}),
        (Route(0, (Hop(0, whole),)), Route(1, (Hop(0, first), Hop(1, second)))),
    )
    candidate, draft = measure(Proposal(name="shared", plan=plan), now)
    assert draft is not None
    sync = estimate_step(plan, draft.course().program, now.costs).sync
    (reduction,) = sync.reductions
    assert reduction.start_s < sync.program_s
    assert candidate.step_s == sync.end_s < sync.program_s + reduction.end_s - reduction.start_s


def test_a_plan_of_workers_that_are_lost_cannot_be_run() -> None:
    now = after(context(dp=2, pp=2), 3)
    candidate, draft = measure(Proposal(name="as-before", plan=now.plan), now)
    assert candidate == Candidate(policy="as-before", reason="it needs workers that are not live: [3]")
    assert draft is None


def test_what_no_worker_has_to_stop_for_costs_nothing() -> None:
    now = context(dp=2, pp=2, spares=1)
    decision = decide(now, "reroute", rate_of(1e6, now))
    assert decision.course is not None
    assert decision.course.plan == now.plan
    assert decision.candidates[0].stall_s == 0
    lost = decide(after(now, 0), "reroute", rate_of(1e6, now)).candidates[0]
    assert lost.stall_s == now.phases.total_s + now.repeat_s


@settings(max_examples=examples(40), deadline=None)
@given(now=contexts(intact=True), policy=st.sampled_from(sorted(POLICIES)))
def test_as_long_as_no_worker_is_lost_one_can_go_on_as_before(now: DecisionContext, policy: str) -> None:
    decision = decide(now, policy, rate_of(100.0, now))
    first, *others = decision.candidates
    assert (first.policy, first.stall_s, first.moved_bytes, first.feasible) == (STAY, 0.0, 0, True)
    assert all(each.stall_s != 0 for each in others if each.feasible), "it is scored once"
    if policy in ("reroute", "recycle", "restart"):
        assert others == []
    assert decision.chosen is not None
    assert decision.chosen.samples >= first.samples


def test_a_worker_that_has_joined_is_taken_where_that_pays() -> None:
    now = context(dp=2, pp=2, share=8, spares=2)
    assert chosen(now, 1.0) == STAY
    decision = decide(now, "chameleon", rate_of(1e6, now))
    assert decision.chosen is not None
    assert decision.chosen.policy == "repartition"
    assert decision.course is not None
    assert len(decision.course.plan.workers) == 6


def test_what_a_transfer_that_was_cut_short_has_left_behind_need_not_move_again() -> None:
    now = after(context(dp=3, pp=2), 1)
    rate = rate_of(1e6, now)
    first = decide(now, "repartition", rate)
    assert first.course is not None
    assert first.course.transfer is not None
    whole = first.course.transfer.placement
    both = {
        worker: tuple(dict.fromkeys((*now.placement.ranges_of(worker), *whole.ranges_of(worker))))
        for worker in now.live
    }
    layers = {worker: sorted({layer for own in ranges for layer in own}) for worker, ranges in both.items()}
    there = replace(now, holdings=placement_of(layers, whole.num_layers))
    again = decide(there, "repartition", rate)
    assert first.chosen is not None
    assert again.chosen is not None
    assert first.chosen.moved_bytes
    assert first.chosen.stall_s is not None
    assert (again.chosen.moved_bytes, again.chosen.transfer_s) == (0, 0.0)
    assert again.chosen.stall_s == now.phases.total_s + now.repeat_s


def test_what_cannot_be_decided_is_refused() -> None:
    now = context(dp=2, pp=2)
    rate = FailureModel(worker_mtbf_s=1.0, prior_failures=1.0)
    with refused(ConfigError):
        decide(now, "chamelion", rate)
    with refused(PlanError):
        decide(after(now, 0, 1, 2, 3), "chameleon", rate)
    with refused(ConfigError):
        replace(context(dp=2, pp=2), step_factor=0.0)
    with refused(ConfigError):
        replace(now, repeat_s=-1.0)
