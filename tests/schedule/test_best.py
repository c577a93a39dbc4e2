"""The choice among schedules of one plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.schedule import (
    InFlightLimit,
    OperationKind,
    Preference,
    best_program,
    check_program,
    default_limits,
    list_schedule,
    replay,
)
from tests.strategies import Planned, Shape, equal_costs, pipelined, pipelines, planned, shapes


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
    assert best.prefer is Preference.FORWARD


@given(pipelined(), st.integers(1, 3), st.integers(0, 2))
def test_the_ceiling_bounds_every_worker(case: Planned, in_flight: int, more: int) -> None:
    ceiling = dict.fromkeys(case.plan.workers, InFlightLimit(in_flight, in_flight + more))

    best = best_program(case.plan, case.costs, ceiling=ceiling)

    check_program(best.program, case.plan)
    for worker in case.plan.workers:
        assert best.limits[worker].in_flight <= in_flight
        kept = most = 0
        for operation in best.program.of(worker):
            kept += operation.kind is OperationKind.FORWARD
            kept -= operation.kind in (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)
            most = max(most, kept)
        assert most <= in_flight + more


def test_more_in_flight_hides_latency() -> None:
    plan = pipelines(Shape(dp=1, pp=4, share=16))
    costs = equal_costs(layers=4, micro_batches=16, workers=4, latency_s=1.0)
    plain_s = replay(list_schedule(plan, costs), costs).step_s

    best = best_program(plan, costs)

    assert best.step_s < 0.85 * plain_s
    assert best_program(plan, costs, ceiling=default_limits(plan)).step_s <= plain_s
