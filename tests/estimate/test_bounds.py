"""Bounds never exceed a replay, and meet it where a closed form is known."""

from __future__ import annotations

import math
from itertools import combinations, count, pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import (
    PipelineTimes,
    cluster_bound_s,
    one_f_one_b_bound_s,
    one_f_one_b_period_s,
    pipeline_bound_s,
    pipeline_times,
    plan_bound_s,
    rerouting_bound_s,
    total_work_bound_s,
)
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, best_program, list_schedule, replay
from chameleon_ft.sync import gradient_segments
from chameleon_ft.workload import LayerCost, Workload
from tests.estimate.programs import one_f_one_b, with_fused_backwards
from tests.strategies import (
    Planned,
    Shape,
    cost_models,
    equal_costs,
    layer_cuts,
    losses,
    pipelined,
    pipelines,
    planned,
    seconds,
    survivable,
)

ROUNDING = 1 + 1e-9


def stage_lists(depth: int) -> st.SearchStrategy[list[float]]:
    return st.lists(seconds, min_size=depth, max_size=depth)


@st.composite
def single_pipelines(draw: st.DrawFn) -> Planned:
    plan = pipelines(
        Shape(dp=1, pp=draw(st.integers(1, 6)), share=draw(st.integers(1, 12))), split_backward=draw(st.booleans())
    )
    return Planned(plan, draw(cost_models(plan)))


@st.composite
def unequal_pipelines(draw: st.DrawFn) -> Planned:
    """Pipelines cut in different places, so that a worker may hold several segments."""
    layers = draw(st.integers(1, 5))
    ids = count()
    ways = [tuple(Hop(next(ids), part) for part in draw(layer_cuts(layers))) for _ in range(draw(st.integers(2, 3)))]
    placement = Placement(layers, {hop.worker: (hop.layers,) for way in ways for hop in way})
    taken = draw(st.lists(st.sampled_from(ways), min_size=1, max_size=8))
    plan = Plan(placement, tuple(Route(m, way) for m, way in enumerate(taken)), draw(st.booleans()))
    return Planned(plan, draw(cost_models(plan)))


@given(with_fused_backwards(planned()))
def test_no_program_is_faster_than_the_bound_of_its_plan(case: Planned) -> None:
    step_s = replay(list_schedule(case.plan, case.costs), case.costs).step_s

    assert plan_bound_s(case.plan, case.costs) <= step_s * ROUNDING
    assert total_work_bound_s(case.costs) <= step_s * ROUNDING


@given(with_fused_backwards(single_pipelines()))
def test_the_bound_of_a_pipeline_is_that_of_its_plan(case: Planned) -> None:
    plan = case.plan
    times = pipeline_times(plan.routes[0].hops, case.costs, split_backward=plan.split_backward)

    assert pipeline_bound_s(times, plan.micro_batches) == pytest.approx(plan_bound_s(plan, case.costs))


@settings(max_examples=300)
@given(with_fused_backwards(single_pipelines()))
def test_1f1b_is_never_slower_than_its_bound_by_the_period(case: Planned) -> None:
    plan = Plan(case.plan.placement, case.plan.routes)
    times = pipeline_times(plan.routes[0].hops, case.costs)
    bound_s = one_f_one_b_bound_s(times, plan.micro_batches)

    assert replay(one_f_one_b(plan), case.costs).step_s <= bound_s * ROUNDING
    assert pipeline_bound_s(times, plan.micro_batches) <= bound_s * ROUNDING


def test_a_slow_forward_before_a_slow_backward_takes_longer_than_the_period_says() -> None:
    """The first stage only runs forwards, the second only backwards, and the last turns round at once."""
    layers = tuple(LayerCost("layer", *times) for times in ((1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 0.0)))
    free = Link(0.0, math.inf)
    costs = CostModel(Workload(layers, 2, 1), Cluster(tuple(Worker(worker, "host") for worker in range(3)), free, free))
    plan = pipelines(Shape(dp=1, pp=3, share=2))
    times = pipeline_times(plan.routes[0].hops, costs)

    # 3 + (2 - 1) 2 = 5 would be the sum of all stages and a period; the second backward waits for two forwards.
    assert replay(one_f_one_b(plan), costs).step_s == 6
    assert one_f_one_b_bound_s(times, 2) == 6


@given(depth=st.integers(1, 6), micro_batches=st.integers(1, 12), forward_s=seconds, backward_s=seconds)
def test_equal_stages_and_free_messages_meet_both_bounds(
    depth: int, micro_batches: int, forward_s: float, backward_s: float
) -> None:
    times = PipelineTimes(
        forward_s=(forward_s,) * depth,
        backward_s=(backward_s,) * depth,
        weight_grad_s=(0.0,) * depth,
        message_s=(0.0,) * (depth - 1),
    )
    closed_form_s = (depth + micro_batches - 1) * (forward_s + backward_s)

    assert one_f_one_b_bound_s(times, micro_batches) == pytest.approx(closed_form_s)
    assert pipeline_bound_s(times, micro_batches) == pytest.approx(closed_form_s)


def test_messages_make_the_period_longer_than_the_slowest_stage() -> None:
    times = PipelineTimes(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), weight_grad_s=(0.0, 0.0), message_s=(0.5,))

    assert one_f_one_b_period_s(times) == pytest.approx((3 + 3 + 1) / 2)


@given(st.data())
def test_the_split_bound_is_at_least_that_of_the_design(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 5))
    m = data.draw(st.integers(1, 10))
    f, b, w = (data.draw(stage_lists(depth)) for _ in range(3))
    times = PipelineTimes(
        forward_s=tuple(f), backward_s=tuple(b), weight_grad_s=tuple(w), message_s=(0.0,) * (depth - 1)
    )

    per_stage = max(sum(f[:i]) + m * (f[i] + b[i] + w[i]) for i in range(depth))
    last_stage = sum(f[:-1]) + sum(b[:-1]) + m * (f[-1] + b[-1]) + w[0]
    assert pipeline_bound_s(times, m) * ROUNDING >= max(per_stage, last_stage)


@given(with_fused_backwards(st.one_of(pipelined(), unequal_pipelines())), st.data())
def test_no_rerouted_program_is_faster_than_the_bound_of_its_placement(case: Planned, data: st.DataObject) -> None:
    plan, costs = case.plan, case.costs
    lost = data.draw(losses(plan))
    assume(survivable(plan, lost))
    rerouted = reroute(plan, lost, costs)
    assume(runs_segments_whole(rerouted))

    bound_s = rerouting_bound_s(
        rerouted.placement, costs, micro_batches=plan.micro_batches, split_backward=plan.split_backward
    )

    assert bound_s <= replay(list_schedule(rerouted, costs), costs).step_s * ROUNDING


@pytest.mark.parametrize("stage", range(4))
def test_equal_workers_have_the_closed_rerouting_bound(stage: int) -> None:
    plan = pipelines(Shape(dp=3, pp=4, share=4))
    costs = equal_costs(layers=4, micro_batches=12, workers=12, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)

    bound_s = rerouting_bound_s(plan.placement.without([stage]), costs, micro_batches=12)

    # Two holders are left: six micro-batches each, after the stages before have run once.
    assert bound_s == pytest.approx(max(stage * 3 + math.ceil(12 / 2) * 3, 3 * 3 + 4 * 3))


@given(with_fused_backwards(pipelined()))
def test_no_plan_of_pipelines_is_faster_than_the_bound_of_the_cluster(case: Planned) -> None:
    plan, costs = case.plan, case.costs

    bound_s = cluster_bound_s(costs, split_backward=plan.split_backward)

    assert total_work_bound_s(costs) <= bound_s * ROUNDING
    assert bound_s <= replay(list_schedule(plan, costs), costs).step_s * ROUNDING


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 3), (3, 4), (4, 4), (4, 5)])
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("fused_backward_s", [1.5, 2.0, 2.5])
def test_the_bound_of_the_cluster_is_below_every_layout_there_is(
    workers: int, micro_batches: int, split_backward: bool, fused_backward_s: float
) -> None:
    """Every set of pipelines, every cut of each and every share of micro-batches; the best layout is to be near."""
    layers = tuple(
        LayerCost("layer", forward_s, 1.0, 1.0, fused_backward_s=fused_backward_s) for forward_s in (0.5, 1.0, 1.0, 1.5)
    )
    link = Link(0.3, math.inf)
    costs = CostModel(
        Workload(layers, micro_batches, 1), Cluster(tuple(Worker(i, "host") for i in range(workers)), link, link)
    )
    best_s = math.inf
    for depths in partitions(workers):
        for cut_choice in product(*(list(cuts(len(layers), depth)) for depth in depths)):
            for shares in compositions(micro_batches, len(depths)):
                plan = layout(cut_choice, shares, len(layers), split_backward=split_backward)
                best_s = min(best_s, best_program(plan, costs).step_s)

    bound_s = cluster_bound_s(costs, split_backward=split_backward)

    assert 0.8 * best_s < bound_s <= best_s * ROUNDING


def test_the_bound_of_the_cluster_counts_the_messages_of_the_deepest_pipeline() -> None:
    costs = equal_costs(layers=2, micro_batches=3, workers=2, latency_s=0.25)

    # Two stages, split: F of the first and one message, then three times 3 s; one worker each has two times 6 s.
    assert cluster_bound_s(costs, split_backward=True) == pytest.approx(1 + 0.25 + 3 * 3, rel=1e-5)
    # Fused, two stages are no better than one worker each: (3 + 1) 3 s and two messages against two times 6 s.
    assert cluster_bound_s(costs) == pytest.approx(2 * 6, rel=1e-5)


def test_a_cluster_that_is_empty_has_no_bound() -> None:
    costs = equal_costs(layers=2, micro_batches=2, workers=0)

    with pytest.raises(PlanError, match="no worker is left"):
        total_work_bound_s(costs)
    with pytest.raises(PlanError, match="no worker is left"):
        cluster_bound_s(costs)


def test_lists_that_do_not_fit_are_no_pipeline() -> None:
    with pytest.raises(PlanError, match="p - 1 message times"):
        PipelineTimes(forward_s=(1.0,), backward_s=(1.0,), weight_grad_s=(0.0,), message_s=(0.0,))


def runs_segments_whole(plan: Plan) -> bool:
    """Whether no hop ends inside a segment; one may where two neighbouring stages were lost."""
    segments = gradient_segments(plan.placement)
    return all(
        any(hop.layers.covers(segment.layers) for hop in route.hops) for route in plan.routes for segment in segments
    )


def partitions(total: int, most: int = 4) -> list[list[int]]:
    """Depths of pipelines, largest first, that use up to `total` workers."""
    found = [[first] for first in range(1, min(total, most) + 1)]
    for first in range(1, min(total, most) + 1):
        found += [[first, *rest] for rest in partitions(total - first, first)]
    return found


def cuts(layers: int, stages: int) -> list[list[LayerRange]]:
    edges = ([0, *inner, layers] for inner in combinations(range(1, layers), stages - 1))
    return [[LayerRange(a, b) for a, b in pairwise(edge)] for edge in edges]


def compositions(total: int, parts: int) -> list[list[int]]:
    edges = ([0, *inner, total] for inner in combinations(range(1, total), parts - 1))
    return [[b - a for a, b in pairwise(edge)] for edge in edges]


def layout(stages: tuple[list[LayerRange], ...], shares: list[int], layers: int, *, split_backward: bool) -> Plan:
    workers = iter(range(99))
    hops = [tuple(Hop(next(workers), part) for part in parts) for parts in stages]
    ways = [way for way, share in zip(hops, shares, strict=True) for _ in range(share)]
    placement = Placement(layers, {hop.worker: (hop.layers,) for way in hops for hop in way})
    return Plan(placement, tuple(Route(m, way) for m, way in enumerate(ways)), split_backward)
