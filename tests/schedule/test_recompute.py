"""Plans with recomputation: scheduled, checked, replayed and bounded like any other."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cost.step import pipeline_bound_s, plan_bound_s
from chameleon_ft.errors import ProgramError
from chameleon_ft.plan import Plan
from chameleon_ft.schedule import best_program, check_program, replay
from chameleon_ft.schedule.network import pipeline_times
from tests.golden import refused
from tests.strategies import Planned, Shape, equal_costs, pipelines, planned, recomputing, some_recompute


@st.composite
def recomputed(draw: st.DrawFn) -> Planned:
    """Draw any plans in which some workers recompute some of their layers."""
    case = draw(planned())
    return Planned(draw(some_recompute(case.plan)), case.costs)


def again_s(case: Planned, worker: int) -> float:
    """Seconds of what a worker runs again of its forwards, summed hop by hop."""
    layers = case.costs.workload.layers
    inner = range(1, len(layers) - 1)
    if (again := case.plan.recompute.get(worker)) is None:
        return 0.0
    return math.fsum(
        (layers[layer].forward_s if layer in again.full else layers[layer].selective_s)
        / case.costs.cluster.worker(worker).speed
        for route in case.plan.routes
        for hop in route.hops
        if hop.worker == worker
        for layer in hop.layers
        if layer in inner and layer in again
    )


@given(recomputed())
def test_workers_compute_longer_by_the_forwards_that_they_run_again(case: Planned) -> None:
    without = dataclasses.replace(case.plan, recompute={})
    program = best_program(case.plan, case.costs).program
    check_program(program, case.plan)
    timeline = replay(program, case.costs)
    kept = replay(best_program(without, case.costs).program, case.costs)

    for worker in case.plan.workers:
        assert timeline.busy_s(worker) == pytest.approx(kept.busy_s(worker) + again_s(case, worker))
    assert plan_bound_s(case.plan, case.costs) <= timeline.step_s * (1 + 1e-9)
    assert plan_bound_s(without, case.costs) <= plan_bound_s(case.plan, case.costs) * (1 + 1e-9)


@given(recomputed())
def test_the_schedule_that_is_chosen_takes_as_long_as_it_was_taken_to(case: Planned) -> None:
    found = best_program(case.plan, case.costs)
    assert found.step_s == pytest.approx(replay(found.program, case.costs).step_s)


def test_a_program_of_the_plan_without_recomputation_is_refused() -> None:
    plan: Plan = pipelines(Shape(dp=1, pp=3, share=2))
    program = best_program(plan, equal_costs(layers=3, micro_batches=2, workers=3)).program

    with refused(ProgramError):
        check_program(program, recomputing(plan, {1}))


def test_a_pipeline_has_the_times_of_its_workers() -> None:
    plan = recomputing(pipelines(Shape(dp=1, pp=4, share=5)), {0, 2, 3})
    costs = equal_costs(layers=4, micro_batches=5, workers=4)

    times = pipeline_times(plan.routes[0].hops, costs, recompute=plan.recompute)

    layer = costs.workload.layers[0]
    extra = [found - layer.backward_s for found in times.backward_s]
    assert extra == pytest.approx([0.0, 0.0, layer.forward_s, 0.0])
    assert pipeline_bound_s(times, 5) == pytest.approx(plan_bound_s(plan, costs))
