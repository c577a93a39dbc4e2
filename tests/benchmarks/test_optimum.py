"""The oracle of the scheduler, where the optimum is known, and a sample of what the benchmark compares."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.optimum import Case, cases, compared, optimum_s
from chameleon_ft.schedule import InFlightLimit, default_limits
from tests.strategies import Shape, equal_costs, pipelines


def pipeline(depth: int, micro_batches: int, *, split_backward: bool = False, latency_s: float = 0.0) -> Case:
    """One pipeline of equal stages, under the limits of 1F1B and ZB-H1."""
    plan = pipelines(Shape(dp=1, pp=depth, share=micro_batches), split_backward=split_backward)
    costs = equal_costs(layers=depth, micro_batches=micro_batches, workers=depth, latency_s=latency_s)
    return Case(name="pipeline", plan=plan, costs=costs, in_flight_limits=default_limits(plan))


def solved(case: Case, at_most_s: int) -> int | None:
    return optimum_s(case, at_most_s=at_most_s, timeout_s=20, threads=1)


@pytest.mark.parametrize(("depth", "micro_batches"), [(1, 3), (2, 4), (3, 4)])
def test_equal_stages_have_the_closed_forms(depth: int, micro_batches: int) -> None:
    fused_s = 3 * (micro_batches + depth - 1)
    assert solved(pipeline(depth, micro_batches), 2 * fused_s) == fused_s
    split_s = 3 * micro_batches + depth - 1
    assert solved(pipeline(depth, micro_batches, split_backward=True), 2 * split_s) == split_s


def test_messages_and_limits_are_seen() -> None:
    case = pipeline(2, 3, latency_s=2.0)
    one = dataclasses.replace(case, in_flight_limits=dict.fromkeys(case.plan.workers, InFlightLimit(1, 1)))

    # One at a time: each goes down and up alone.
    assert solved(one, 99) == 3 * (2 * 3 + 2 * 2)
    free = dataclasses.replace(case, in_flight_limits=None)
    found_s = solved(free, 99)
    # First forward and message, all of the second stage, message and the last backward.
    assert found_s is not None
    assert found_s >= 1 + 2 + 3 * 3 + 2 + 2
    assert found_s < 3 * (2 * 3 + 2 * 2)


@pytest.mark.parametrize("case", list(cases(10, seed=5, max_operations=60)), ids=lambda case: case.name)
def test_programs_are_close_to_the_optimum(case: Case) -> None:
    outcome = compared(case, timeout_s=30, threads=1)

    assert outcome.gap is not None
    assert 0 <= outcome.gap <= 0.03
    assert not outcome.beyond_limits
