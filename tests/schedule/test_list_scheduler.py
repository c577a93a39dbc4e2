"""Properties of the programs of any plan."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Hop, Plan
from chameleon_ft.schedule import (
    CostModel,
    InFlightLimit,
    Operation,
    OperationKind,
    Program,
    Timeline,
    best_program,
    check_program,
    default_limits,
    list_schedule,
    replay,
)
from tests.golden import refused
from tests.strategies import Planned, Shape, cost_models, equal_costs, mixed, pipelined, pipelines, planned, plans

FORWARD = OperationKind.FORWARD
preferences = st.booleans()


def max_kept(program: Program, worker: int, *, until: tuple[OperationKind, ...]) -> int:
    """The most hops a worker has forwarded and not yet run one of `until` of."""
    kept = most = 0
    for operation in program.of(worker):
        kept += (operation.kind is FORWARD) - (operation.kind in until)
        most = max(most, kept)
    return most


def assert_times_are_possible(timeline: Timeline, plan: Plan, costs: CostModel) -> None:
    """Workers do one thing at a time, every operation takes its time, and tensors come before what needs them."""
    end_s: dict[tuple[OperationKind, int, int], tuple[float, int]] = {}
    for timed in timeline.operations:
        operation = timed.operation
        end_s[operation.kind, operation.micro_batch, operation.hop] = timed.end_s, timed.worker
        assert timed.end_s - timed.start_s == pytest.approx(costs.operation_s(timed.worker, operation), abs=1e-9)
    for worker in plan.workers:
        own = timeline.of(worker)
        assert all(one.end_s <= next_.start_s for one, next_ in pairwise(own))
    for timed in timeline.operations:
        operation = timed.operation
        boundary = operation.layers.stop - 1
        match operation.kind:
            case OperationKind.FORWARD if operation.first:
                continue
            case OperationKind.FORWARD:
                before, boundary = (FORWARD, operation.hop - 1), operation.layers.start - 1
            case OperationKind.WEIGHT_GRAD:
                before = OperationKind.INPUT_GRAD, operation.hop
            case _ if operation.last:
                before = FORWARD, operation.hop
            case _:
                before = operation.kind, operation.hop + 1
        kind, hop = before
        made_s, maker = end_s[kind, operation.micro_batch, hop]
        message_s = costs.message_s(maker, timed.worker, costs.message_bytes(boundary))
        assert timed.start_s >= made_s + message_s - 1e-9


@given(mixed(planned()), preferences, st.integers(0, 20))
def test_any_plan_gets_a_program_that_runs(case: Planned, forward_first: bool, extra: int) -> None:
    limits = {
        worker: InFlightLimit(limit.in_flight + extra, limit.kept + extra)
        for worker, limit in default_limits(case.plan).items()
    }

    program = list_schedule(case.plan, case.costs, limits, forward_first=forward_first)

    check_program(program, case.plan)
    assert program.workers == case.plan.workers
    assert_times_are_possible(replay(program, case.costs), case.plan, case.costs)
    assert list_schedule(case.plan, case.costs, limits, forward_first=forward_first) == program


@given(planned(several_ranges=False), preferences)
def test_tight_limits_never_get_a_program_stuck(case: Planned, forward_first: bool) -> None:
    limits = dict.fromkeys(case.plan.workers, InFlightLimit(1, 1))

    program = list_schedule(case.plan, case.costs, limits, forward_first=forward_first)

    check_program(program, case.plan)


@given(pipelined(), preferences, st.integers(1, 6), st.integers(0, 6))
def test_pipelines_keep_to_their_limits(case: Planned, forward_first: bool, in_flight: int, more: int) -> None:
    limits = dict.fromkeys(case.plan.workers, InFlightLimit(in_flight, in_flight + more))

    program = list_schedule(case.plan, case.costs, limits, forward_first=forward_first)

    for worker in case.plan.workers:
        turned = (OperationKind.BACKWARD, OperationKind.INPUT_GRAD)
        freed = (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)
        assert max_kept(program, worker, until=turned) <= in_flight
        assert max_kept(program, worker, until=freed) <= in_flight + more


@given(planned())
def test_no_time_is_below_what_its_workers_and_its_ways_need(case: Planned) -> None:
    plan, costs = case.plan, case.costs

    timeline = replay(list_schedule(plan, costs), costs)

    work_s = sum(timeline.busy_s(worker) for worker in plan.workers)
    assert timeline.step_s >= work_s / len(plan.workers) - 1e-9
    for worker in plan.workers:
        assert timeline.step_s >= timeline.busy_s(worker) - 1e-9
    kinds = (FORWARD, OperationKind.INPUT_GRAD if plan.split_backward else OperationKind.BACKWARD)
    for route in plan.routes:
        way_s = sum(
            costs.operation_s(hop.worker, Operation.of(kind, route, index))
            for kind in kinds
            for index, hop in enumerate(route.hops)
        )
        for hop, after in pairwise(route.hops):
            way_s += 2 * costs.message_s(hop.worker, after.worker, costs.message_bytes(hop.layers.stop - 1))
        assert timeline.step_s >= way_s - 1e-9


def pipeline_bound_s(hops: tuple[Hop, ...], share: int, costs: CostModel, *, split_backward: bool) -> float:
    """The lower bounds for `share` micro-batches through one pipeline."""

    def times(kind: OperationKind) -> list[float]:
        return [costs.compute_s(hop.worker, kind, hop.layers) for hop in hops]

    stages = range(len(hops))
    f = times(FORWARD)
    if split_backward:
        b, w = times(OperationKind.INPUT_GRAD), times(OperationKind.WEIGHT_GRAD)
        return max(
            *(sum(f[:i]) + share * (f[i] + b[i] + w[i]) for i in stages),
            sum(f[:-1]) + sum(b[:-1]) + share * (f[-1] + b[-1]) + w[0],
        )
    b = times(OperationKind.BACKWARD)
    c = [
        costs.message_s(hop.worker, after.worker, costs.message_bytes(hop.layers.stop - 1))
        for hop, after in pairwise(hops)
    ]
    return max(sum(f[:i]) + sum(b[:i]) + 2 * sum(c[:i]) + share * (f[i] + b[i]) for i in stages)


@given(pipelined())
def test_pipelines_are_not_faster_than_their_lower_bounds(case: Planned) -> None:
    plan, costs = case.plan, case.costs

    step_s = best_program(plan, costs).step_s

    for hops, share in Counter(route.hops for route in plan.routes).items():
        bound_s = pipeline_bound_s(hops, share, costs, split_backward=plan.split_backward)
        assert step_s >= bound_s - 1e-9


def test_the_default_limits_of_a_pipeline_are_those_of_1f1b_and_zb_h1() -> None:
    limits = default_limits(pipelines(Shape(dp=2, pp=3, share=4)))

    assert [limits[worker] for worker in range(6)] == [InFlightLimit(3 - i, 3) for i in range(3)] * 2


@pytest.mark.parametrize(("in_flight", "kept"), [(0, 1), (2, 1), (-1, -1)])
def test_a_limit_must_leave_room(in_flight: int, kept: int) -> None:
    with refused(PlanError):
        InFlightLimit(in_flight, kept)


def test_limits_must_name_every_worker() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=1))
    with refused(PlanError):
        list_schedule(plan, equal_costs(layers=2, micro_batches=1, workers=2), {0: InFlightLimit(1, 1)})


def test_a_workload_of_another_model_is_refused() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=1))
    with refused(PlanError):
        list_schedule(plan, equal_costs(layers=3, micro_batches=1, workers=2))


def test_a_cluster_without_a_worker_of_the_plan_is_refused() -> None:
    plan = pipelines(Shape(dp=1, pp=2, share=1))
    with refused(ConfigError):
        list_schedule(plan, equal_costs(layers=2, micro_batches=1, workers=1))


@given(plans(), st.data())
def test_costs_do_not_change_what_is_run(plan: Plan, data: st.DataObject) -> None:
    programs = [list_schedule(plan, data.draw(cost_models(plan))) for _ in range(2)]

    for worker in plan.workers:
        assert set(programs[0].of(worker)) == set(programs[1].of(worker))


def test_a_worker_without_a_route_is_idle() -> None:
    plan = pipelines(Shape(dp=2, pp=1, share=1))
    idle = Plan(plan.placement, (plan.routes[0],))
    costs = equal_costs(layers=1, micro_batches=1, workers=2)

    chosen = best_program(idle, costs)

    assert chosen.program.of(1) == ()
    assert replay(chosen.program, costs).busy_s(1) == 0
    assert math.isclose(chosen.step_s, 3)
