"""The choice among schedules of one plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route, split_layers
from chameleon_ft.schedule import (
    InFlightLimit,
    OperationKind,
    PipelineSchedule,
    PipelineTimes,
    best_program,
    check_program,
    default_limits,
    list_schedule,
    pipeline_schedule,
    replay,
)
from chameleon_ft.schedule.best import DEFAULT_EFFORT, best_parts, program_of, step_s_of
from chameleon_ft.schedule.network import pipeline_times
from tests.examples import examples
from tests.strategies import Planned, Shape, cost_models, equal_costs, mixed, pipelined, pipelines, planned, shapes

QUICK = 1_000  # one or two list schedules of a pipeline


@given(planned())
def test_it_is_as_fast_as_it_says_and_runs(case: Planned) -> None:
    best = best_program(case.plan, case.costs)

    check_program(best.program, case.plan)
    assert replay(best.program, case.costs).step_s == best.step_s
    assert set(best.limits) == set(case.plan.workers)


@given(shapes, st.booleans())
def test_with_free_messages_and_equal_stages_the_defaults_are_best(shape: Shape, split_backward: bool) -> None:
    plan = pipelines(shape)
    costs = equal_costs(layers=shape.pp, micro_batches=shape.dp * shape.share, workers=shape.dp * shape.pp)

    best = best_program(plan, costs)

    assert best.program == list_schedule(plan, costs)
    assert best.limits == default_limits(plan)


@given(pipelined(), st.integers(1, 3), st.integers(0, 2))
def test_in_flight_limits_bound_every_worker(case: Planned, in_flight: int, more: int) -> None:
    in_flight_limits = dict.fromkeys(case.plan.workers, InFlightLimit(in_flight, in_flight + more))

    best = best_program(case.plan, case.costs, in_flight_limits=in_flight_limits)

    check_program(best.program, case.plan)
    for worker in case.plan.workers:
        assert best.limits[worker].in_flight <= in_flight
        kept = most = 0
        for operation in best.program.of(worker):
            kept += operation.kind is OperationKind.FORWARD
            kept -= operation.kind in (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)
            most = max(most, kept)
        assert most <= in_flight + more


@st.composite
def side_by_side(draw: st.DrawFn) -> Planned:
    """Pipelines of different depths and shares, some of them alike, on workers with ids and hosts in any order."""
    layers = draw(st.integers(2, 4))
    held: dict[int, tuple[LayerRange, ...]] = {}
    ways: list[tuple[Hop, ...]] = []
    ids = iter(draw(st.permutations(range(20))))
    for _ in range(draw(st.integers(1, 5))):
        depth = draw(st.integers(1, layers))
        hops = tuple(Hop(next(ids), stage) for stage in split_layers([1.0] * layers, depth))
        held.update((hop.worker, (hop.layers,)) for hop in hops)
        ways += [hops] * draw(st.integers(1, 4))
    routes = tuple(map(Route, range(len(ways)), draw(st.permutations(ways))))
    plan = Plan(Placement(layers, held), routes, draw(st.booleans()))
    alike = equal_costs(layers=layers, micro_batches=len(ways), workers=20, latency_s=draw(st.sampled_from([0, 0.5])))
    return Planned(plan, draw(st.one_of(st.just(alike), cost_models(plan))))


def apart(plan: Plan) -> Iterator[Plan]:
    """Each set of workers that routes join, as a plan of its own; found by networkx."""
    graph = nx.Graph()
    for route in plan.routes:
        nx.add_path(graph, [hop.worker for hop in route.hops])
        graph.add_node(route.hops[0].worker)
    for workers in nx.connected_components(graph):
        ways = [route.hops for route in plan.routes if route.hops[0].worker in workers]
        gone = set(plan.workers) - workers
        yield Plan(
            plan.placement.without(gone), tuple(map(Route, range(len(ways)), ways)), plan.splits(ways[0][0].worker)
        )


@settings(max_examples=examples(60))
@given(mixed(st.one_of(side_by_side(), planned(), pipelined())), st.sampled_from([0, 500, DEFAULT_EFFORT]), st.data())
def test_a_plan_takes_as_long_as_the_slowest_of_its_parts_alone(
    case: Planned, effort: int, data: st.DataObject
) -> None:
    limits = st.builds(
        lambda in_flight, more: InFlightLimit(in_flight, in_flight + more), st.just(2), st.integers(0, 2)
    )
    in_flight_limits = data.draw(st.dictionaries(st.sampled_from(case.plan.workers), limits))

    best = best_program(case.plan, case.costs, in_flight_limits=in_flight_limits, effort=effort)

    check_program(best.program, case.plan)
    assert replay(best.program, case.costs).step_s == best.step_s
    alone = [
        best_program(part, case.costs, in_flight_limits=in_flight_limits, effort=effort).step_s
        for part in apart(case.plan)
    ]
    assert best.step_s == max(alone)
    assert step_s_of(best_parts(case.plan, case.costs, in_flight_limits=in_flight_limits, effort=effort)) == best.step_s


@settings(max_examples=examples(40))
@given(st.one_of(planned(), pipelined()))
def test_effort_is_never_in_vain(case: Planned) -> None:
    first, quick, default = (
        best_program(case.plan, case.costs, effort=effort).step_s for effort in (0, QUICK, DEFAULT_EFFORT)
    )

    assert max(quick, default) <= first


@pytest.mark.parametrize("split_backward", [False, True])
def test_pipelines_that_are_alike_are_scheduled_once(split_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = pipelines(Shape(dp=50, pp=4, share=3), split_backward=split_backward)
    costs = equal_costs(layers=4, micro_batches=150, workers=200, latency_s=0.5)
    slow = tuple(replace(worker, speed=0.5) if worker.id == 77 else worker for worker in costs.cluster.workers)
    runs = Counter[int]()

    def counted(times: PipelineTimes, micro_batches: int, **more: Any) -> PipelineSchedule:
        runs[times.depth * micro_batches] += 1
        return pipeline_schedule(times, micro_batches, **more)

    monkeypatch.setattr("chameleon_ft.schedule.best.pipeline_schedule", counted)

    best_program(plan, costs, effort=0)
    best_program(plan, replace(costs, cluster=replace(costs.cluster, workers=slow)), effort=0)

    # One for all, then two: pipeline 19 has the slow worker.
    assert runs == {12: 3}


def test_more_in_flight_hides_latency() -> None:
    plan = pipelines(Shape(dp=1, pp=4, share=16))
    costs = equal_costs(layers=4, micro_batches=16, workers=4, latency_s=1.0)
    plain_s = replay(list_schedule(plan, costs), costs).step_s

    best = best_program(plan, costs)

    assert best.step_s < 0.85 * plain_s
    assert best_program(plan, costs, in_flight_limits=default_limits(plan)).step_s <= plain_s


@given(pipelined(), st.data())
def test_pipelines_that_are_known_are_taken_as_they_are(case: Planned, data: st.DataObject) -> None:
    """Also on workers that take as long; all others are scheduled as they would be alone."""
    plan, costs = case.plan, case.costs
    ways = {route.hops: None for route in plan.routes}
    share = plan.micro_batches // len(ways)
    chosen = data.draw(st.sets(st.sampled_from(sorted(ways, key=lambda hops: hops[0].worker))))
    times = {hops: pipeline_times(hops, costs, split_backward=plan.split_backward) for hops in ways}
    depth = len(next(iter(ways)))
    few, many = np.ones((3, depth), np.int64), np.full((3, depth), 3 * depth)
    # Fewer in flight than any heuristic would choose.
    slow = {
        times[hops]: replace(
            pipeline_schedule(
                times[hops], share, split_backward=plan.split_backward, in_flight_limits=few, effort=QUICK
            ),
            in_flight_limits=many,
        )
        for hops in chosen
    }
    in_flight_limits = dict.fromkeys(plan.workers, InFlightLimit(3 * depth, 3 * depth))

    parts = best_parts(plan, costs, in_flight_limits=in_flight_limits, effort=QUICK, reuse=slow.values())

    program = program_of(plan, parts)
    check_program(program, plan)
    assert replay(program, costs).step_s == pytest.approx(step_s_of(parts), rel=1e-12)
    alone = {part.component.workers: part for part in best_parts(plan, costs, effort=QUICK)}
    for part in parts:
        (hops,) = part.component.paths
        if times[hops] in slow:
            assert part.schedule is slow[times[hops]]
        else:
            assert part.schedule.step_s >= alone[part.component.workers].schedule.step_s * (1 - 1e-9)


@given(pipelined(), st.integers(1, 3))
def test_what_is_known_of_workers_that_keep_more_is_not_taken(case: Planned, in_flight: int) -> None:
    plan, costs = case.plan, case.costs
    in_flight_limits = dict.fromkeys(plan.workers, InFlightLimit(in_flight, in_flight))
    split = plan.split_backward
    ways = Counter(route.hops for route in plan.routes)
    known = [
        pipeline_schedule(
            pipeline_times(hops, costs, split_backward=split),
            share,
            split_backward=split,
            in_flight_limits=np.full((3, len(hops)), in_flight + 1),
            effort=QUICK,
        )
        for hops, share in ways.items()
    ]

    parts = best_parts(plan, costs, in_flight_limits=in_flight_limits, effort=QUICK, reuse=known)

    assert program_of(plan, parts) == best_program(plan, costs, in_flight_limits=in_flight_limits, effort=QUICK).program
