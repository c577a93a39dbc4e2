"""When gradients are reduced."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.step import estimate_sync
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import CostModel, OperationKind, Timeline, list_schedule, replay
from chameleon_ft.sync import Segment, gradient_segments, segment_bytes
from chameleon_ft.workload import LayerCost, TiedParameters, Workload
from tests.cost.programs import reduction_s
from tests.strategies import Planned, Shape, equal_costs, pipelines, planned


@st.composite
def with_gradients(draw: st.DrawFn) -> Planned:
    case = draw(planned())
    layers = tuple(
        dataclasses.replace(layer, gradient_bytes=draw(st.integers(0, 100))) for layer in case.costs.workload.layers
    )
    return Planned(case.plan, CostModel(dataclasses.replace(case.costs.workload, layers=layers), case.costs.cluster))


def gradients_complete_s(timeline: Timeline, worker: int, segment: Segment) -> float:
    """When the last gradient of any layer of the segment is made on a worker; layer by layer."""
    makes = (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)
    ends = [
        timed.end_s
        for timed in timeline.of(worker)
        if timed.operation.kind in makes
        for layer in segment.layers
        if layer in timed.operation.layers
    ]
    return max(ends, default=0.0)


@given(with_gradients())
def test_a_reduction_waits_for_its_gradients_and_for_the_one_before(case: Planned) -> None:
    timeline = replay(list_schedule(case.plan, case.costs), case.costs)

    found = estimate_sync(case.plan.placement, timeline, case.costs)

    layers = case.costs.workload.layers
    shared = [
        segment
        for segment in gradient_segments(case.plan.placement)
        if len(segment.holders) > 1 and any(layers[layer].gradient_bytes for layer in segment.layers)
    ]
    assert sorted((r.segment for r in found.reductions), key=lambda s: s.layers) == shared
    free_s: dict[int, float] = defaultdict(float)
    for reduction in found.reductions:
        segment = reduction.segment
        waits_for = [gradients_complete_s(timeline, worker, segment) for worker in segment.holders]
        assert reduction.start_s == max([*waits_for, *(free_s[worker] for worker in segment.holders)])
        assert reduction.end_s == reduction.start_s + reduction_s(segment, case.costs)
        free_s.update(dict.fromkeys(segment.holders, reduction.end_s))
    assert found.exposed_s == max(0.0, max(free_s.values(), default=0.0) - timeline.step_s)


@given(planned())
def test_without_gradients_nothing_is_reduced(case: Planned) -> None:
    timeline = replay(list_schedule(case.plan, case.costs), case.costs)

    found = estimate_sync(case.plan.placement, timeline, case.costs)

    assert found.reductions == ()
    assert found.exposed_s == 0.0


def test_the_ring_has_its_closed_form() -> None:
    costs = cluster_costs(hosts=["a"] * 4, gradient_bytes=1000)

    # 2 (n - 1) alpha + 2 (n - 1) / n * bytes / beta, on the link inside the host.
    expected_s = 2 * 3 * 0.25 + 2 * 3 / 4 * 1000 / 100.0
    assert reduction_s(Segment(LayerRange(0, 1), (0, 1, 2, 3)), costs) == pytest.approx(expected_s)


def test_the_slowest_link_of_the_ring_sets_the_pace() -> None:
    costs = cluster_costs(hosts=["a", "b", "a", "b"], gradient_bytes=1000)
    segment = Segment(LayerRange(0, 1), (0, 1, 2, 3))

    assert reduction_s(segment, costs) == pytest.approx(2 * 3 * 2.0 + 2 * 3 / 4 * 1000 / 10.0)
    assert reduction_s(Segment(LayerRange(0, 1), (0, 2)), costs) == pytest.approx(2 * 0.25 + 1000 / 100.0)
    assert reduction_s(Segment(LayerRange(0, 1), (0,)), costs) == 0.0


def test_the_first_stage_reduces_last_and_alone_is_exposed() -> None:
    plan = pipelines(Shape(dp=2, pp=3, share=4))
    costs = equal_costs(layers=3, micro_batches=8, workers=6, latency_s=0.125, gradient_bytes=1)
    timeline = replay(list_schedule(plan, costs), costs)

    found = estimate_sync(plan.placement, timeline, costs)

    assert [reduction.round for reduction in found.reductions] == [0, 0, 0]
    assert found.reductions[0].start_s > found.reductions[1].start_s > found.reductions[2].start_s
    assert found.exposed_s == pytest.approx(2 * 0.125)


def test_what_is_tied_is_reduced_once_by_all_that_hold_a_copy() -> None:
    plan = pipelines(Shape(dp=2, pp=2, share=4))
    costs = equal_costs(layers=2, micro_batches=8, workers=4, latency_s=0.125, gradient_bytes=8)
    tied = CostModel(dataclasses.replace(costs.workload, tied=(TiedParameters((0, 1), 3),)), costs.cluster)
    timeline = replay(list_schedule(plan, costs), costs)

    found = estimate_sync(plan.placement, timeline, tied)

    assert [
        (r.segment.made_by, r.segment.holders, segment_bytes(r.segment, tied.workload)) for r in found.reductions
    ] == [
        ((0,), (0, 2), 5),
        ((1,), (1, 3), 5),
        ((0, 1), (0, 1, 2, 3), 3),
    ]
    assert found.exposed_s == pytest.approx(2 * 0.125 + 6 * 0.125)


def test_layers_with_only_tied_parameters_reduce_nothing_else() -> None:
    plan = pipelines(Shape(dp=2, pp=2, share=4))
    costs = equal_costs(layers=2, micro_batches=8, workers=4, gradient_bytes=8)
    tied = CostModel(dataclasses.replace(costs.workload, tied=(TiedParameters((0, 1), 8),)), costs.cluster)

    found = estimate_sync(plan.placement, replay(list_schedule(plan, costs), costs), tied)

    assert [reduction.segment.tied for reduction in found.reductions] == [(0, 1)]


def cluster_costs(*, hosts: list[str], gradient_bytes: int) -> CostModel:
    workers = tuple(Worker(number, host) for number, host in enumerate(hosts))
    layer = LayerCost("layer", 1.0, 1.0, 1.0, gradient_bytes=gradient_bytes)
    return CostModel(Workload((layer,), 1, 1), Cluster(workers, Link(0.25, 100.0), Link(2.0, 10.0)))


def test_a_link_that_costs_nothing_reduces_at_once() -> None:
    assert Link(0.0, math.inf).ring_all_reduce_s(1e9, 8) == 0.0
