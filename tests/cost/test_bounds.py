"""Bounds never exceed a replay, and meet it where a closed form is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cost.step import pipeline_bound_s, plan_bound_s, total_work_bound_s
from chameleon_ft.errors import PlanError
from chameleon_ft.schedule import list_schedule, replay
from chameleon_ft.schedule.network import PipelineTimes, pipeline_times
from tests.cost.programs import with_fused_backwards
from tests.golden import refused
from tests.strategies import (
    Planned,
    Shape,
    cost_models,
    equal_costs,
    pipelines,
    planned,
    seconds,
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


@given(depth=st.integers(1, 6), micro_batches=st.integers(1, 12), forward_s=seconds, backward_s=seconds)
def test_equal_stages_and_free_messages_meet_the_bound(
    depth: int, micro_batches: int, forward_s: float, backward_s: float
) -> None:
    times = PipelineTimes(
        forward_s=(forward_s,) * depth,
        backward_s=(backward_s,) * depth,
        weight_grad_s=(0.0,) * depth,
        message_s=(0.0,) * (depth - 1),
    )
    closed_form_s = (depth + micro_batches - 1) * (forward_s + backward_s)

    assert pipeline_bound_s(times, micro_batches) == pytest.approx(closed_form_s)


@given(st.data())
def test_the_split_bound_is_at_least_the_simple_one(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 5))
    m = data.draw(st.integers(1, 10))
    f, b, w = (data.draw(stage_lists(depth)) for _ in range(3))
    times = PipelineTimes(
        forward_s=tuple(f), backward_s=tuple(b), weight_grad_s=tuple(w), message_s=(0.0,) * (depth - 1)
    )

    per_stage = max(sum(f[:i]) + m * (f[i] + b[i] + w[i]) for i in range(depth))
    last_stage = sum(f[:-1]) + sum(b[:-1]) + m * (f[-1] + b[-1]) + w[0]
    assert pipeline_bound_s(times, m) * ROUNDING >= max(per_stage, last_stage)


def test_a_cluster_that_is_empty_has_no_bound() -> None:
    costs = equal_costs(layers=2, micro_batches=2, workers=0)

    with refused(PlanError):
        total_work_bound_s(costs)


def test_lists_that_do_not_fit_are_no_pipeline() -> None:
    with refused(PlanError):
        PipelineTimes(forward_s=(1.0,), backward_s=(1.0,), weight_grad_s=(0.0,), message_s=(0.0,))
