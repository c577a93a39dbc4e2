"""Proposals of the published systems: Oobleck, ReCycle, and the paper's own estimates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from chameleon_ft.cluster import Link
from chameleon_ft.lab.oobleck import oobleck_plan
from chameleon_ft.lab.paper import paper_plan, rerouted_s
from chameleon_ft.plan import Hop, LayerRange, Plan, data_pipeline_plan
from chameleon_ft.recovery import POLICIES, decide
from tests.recovery.contexts import after, context, layer, rate_of
from tests.recovery.proposed import moved_bytes, plan_of, shares_of


def test_the_plan_of_oobleck_is_its_planners() -> None:
    now = after(context(dp=3, pp=2, layers=(layer(100),) * 6), 1)
    baseline = oobleck_plan(now.costs, current=now.placement)
    assert baseline is not None
    (only,) = POLICIES["oobleck"](now, 1e6)
    assert only.plan is not None
    assert sorted(map(len, shares_of(only.plan))) == sorted(map(len, shares_of(baseline.found.plan)))
    assert moved_bytes(now, only.plan) <= moved_bytes(now, baseline.found.plan)
    (candidate,) = decide(now, "oobleck", rate_of(1e6, now)).candidates
    assert candidate.step_s is not None
    assert candidate.step_s <= baseline.found.step_s * (1 + 1e-9)
    small = after(context(dp=2, pp=2, layers=(layer(100),) * 4, memory_bytes=700), 0)
    (none,) = POLICIES["oobleck"](small, 1e6)
    assert none.plan is None
    assert "no combination of templates" in str(none.reason)


def test_oobleck_keeps_its_pipelines_too() -> None:
    """As its released code: the pipeline that has lost a worker takes the template of its new size."""
    before = context(dp=3, pp=3, share=8, layers=(layer(100),) * 6, link=Link(0.0, 1e6))
    best, kept = POLICIES["oobleck"](after(before, 1), 1e6)
    assert best.plan is not None
    assert kept.plan is not None
    assert sorted(map(len, shares_of(best.plan))) == [1] * 8
    assert sorted(map(len, shares_of(kept.plan))) == [2, 3, 3]
    assert moved_bytes(after(before, 1), kept.plan) < moved_bytes(after(before, 1), best.plan)
    # A worker that has joined was in no pipeline, so there is none to keep it in.
    joined = context(dp=3, pp=3, share=8, layers=(layer(100),) * 6, link=Link(0.0, 1e6), spares=1)
    (best,) = POLICIES["oobleck"](after(joined, 1), 1e6)
    assert best.plan is not None
    assert len(best.plan.workers) == 9


@pytest.mark.parametrize("split", [False, True])
def test_recycle_decouples_the_backward_after_a_loss(split: bool) -> None:
    before = context(dp=2, pp=2, split_backward=split)
    (intact,) = POLICIES["recycle"](before, 1e6)
    assert intact.plan == before.plan
    now = after(before, 1)
    proposals = {each.name: each.plan for each in POLICIES["recycle"](now, 1e6)}
    decoupled = set() if split else {"recycle-decoupled", "recycle-decoupled-2"}
    assert proposals.keys() == {"recycle", *decoupled}
    for name, plan in proposals.items():
        assert plan is not None
        assert plan.split_backward == (split or name in decoupled)
        assert moved_bytes(now, plan) == 0
    if not split:
        decision = decide(now, "recycle", rate_of(1e6, now))
        steps = {each.policy: each.step_s for each in decision.candidates}
        assert decision.chosen is not None
        assert decision.chosen.step_s == min(step_s for step_s in steps.values() if step_s is not None)


def test_the_papers_estimate_of_rerouting() -> None:
    # (N_pp + N_m - 1 + N_m F_i / (N_dp - F_i)) (t_f + t_b), with two layers to a stage: t_f + t_b = 2 + 4.
    before = context(dp=4, pp=3, share=9)
    assert rerouted_s(before) == (3 + 9 - 1) * 6
    assert rerouted_s(after(before, 4)) == pytest.approx((3 + 9 - 1 + 9 / 3) * 6)
    assert rerouted_s(after(before, 4, 6)) == pytest.approx((3 + 9 - 1 + 9 / 3 + 9 / 3) * 6)
    assert rerouted_s(after(before, 4, 1)) == pytest.approx((3 + 9 - 1 + 2 * 9 / 2) * 6)
    assert rerouted_s(after(before, 1, 4, 7, 10)) == math.inf
    # What was rerouted before counts on.
    once = after(before, 4)
    twice = replace(once, plan=plan_of(once, "reroute"))
    assert rerouted_s(after(twice, 4, 6)) == rerouted_s(after(before, 4, 6))


def test_the_papers_estimate_on_unequal_pipelines() -> None:
    # One pipeline of two stages of three layers, one of one stage: 9 (t_f + t_b) each, and 18.
    layers = LayerRange(0, 6)
    base = context(dp=1, pp=2, share=4, layers=(layer(10),) * 6, spares=1)
    routes = [*base.plan.routes[:3], replace(base.plan.routes[3], hops=(Hop(2, layers),))]
    placement = replace(base.plan.placement, ranges={**base.plan.placement.ranges, 2: (layers,)})
    now = replace(base, plan=Plan(placement, tuple(routes)))
    # 1F1B of three micro-batches on two stages of 9 s: (2 + 3 - 1) 9.
    assert rerouted_s(now) == 36
    # Its one micro-batch goes over one live holder of each layer.
    assert rerouted_s(after(now, 2)) == 36 + 18
    assert rerouted_s(after(now, 0)) == 36 + 3 * 9
    detoured = replace(now, plan=plan_of(after(now, 0), "reroute"))
    assert shares_of(detoured.plan) == {(2, 1): 3, (2,): 1}
    assert rerouted_s(after(detoured, 0)) == math.inf


def test_the_papers_detours_are_shared_by_all_live_holders() -> None:
    layers = LayerRange(0, 6)
    base = context(dp=2, pp=2, share=3, layers=(layer(10),) * 6, spares=1)
    routes = (*base.plan.routes[:5], replace(base.plan.routes[5], hops=(Hop(4, layers),)))
    placement = replace(base.plan.placement, ranges={**base.plan.placement.ranges, 4: (layers,)})
    now = replace(base, plan=Plan(placement, routes))
    # (2 + 3 - 1) 9 for the slowest pipeline; 3 (t_f + t_b) of worker 0 go over workers 2 and 4.
    assert rerouted_s(after(now, 0)) == 36 + 3 * 9 / 2


def test_the_paper_chooses_by_its_own_estimates() -> None:
    now = after(context(dp=3, pp=2, share=12, layers=(layer(1000),) * 6, link=Link(0.0, 100.0)), 1)
    found = paper_plan(now.costs, current=now.placement)
    assert found is not None
    detour_s = rerouted_s(now)
    assert found.estimate_s < detour_s
    (moved,) = POLICIES["paper"](now, 1e9)
    assert moved.name == "paper-repartition"
    (candidate,) = decide(now, "paper", rate_of(1e9, now)).candidates
    assert candidate.transfer_s
    # (D - t_transition) / t_step of a re-partition equals D / t_step of rerouting here.
    even_s = candidate.transfer_s / (1 - found.estimate_s / detour_s)
    assert POLICIES["paper"](now, even_s * 1.001)[0].name == "paper-repartition"
    assert POLICIES["paper"](now, even_s * 0.999)[0].name == "paper-reroute"


def test_the_paper_takes_what_can_be_done() -> None:
    # Of three workers, one would have to hold both layers.
    now = after(context(dp=2, pp=2, layers=(layer(100),) * 2, memory_bytes=700), 3)
    assert POLICIES["paper"](now, 1e9)[0].name == "paper-reroute"
    broken = after(now, 1)
    (none,) = POLICIES["paper"](broken, 1e9)
    assert (none.name, none.plan) == ("paper-repartition", None)


def test_recycle_proposes_the_plan_of_the_start_again() -> None:
    now = context(dp=2, pp=2)
    assert plan_of(now, "recycle") == now.plan == data_pipeline_plan(layer_costs=[3.0] * 4, dp=2, pp=2, micro_batches=8)


def test_idle_workers_take_the_places_of_lost_ones() -> None:
    before = context(dp=2, pp=2, spares=1, split_backward=True)
    assert [each.name for each in POLICIES["recycle"](after(before, 1), 1e6)] == ["recycle"], "there is no home to fill"
    now = replace(after(before, 1), home=before.plan, home_in_flight_limits=before.in_flight_limits)
    detours, rejoined = POLICIES["recycle"](now, 1e6)
    assert (detours.name, rejoined.name) == ("recycle", "recycle-rejoin")
    assert rejoined.plan is not None
    assert rejoined.plan.workers == (0, 2, 3, 4)
    assert rejoined.plan.placement.ranges_of(4) == before.plan.placement.ranges_of(1)
    # Two places are empty, and there is one worker for them: peers do the rest.
    (_, partly) = POLICIES["recycle"](replace(now, costs=after(before, 1, 2).costs), 1e6)
    assert partly.plan is not None
    assert set(partly.plan.workers) == {0, 3, 4}
