"""The paper's closed forms, where a replay must agree with them and where it is known not to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.memory import program_memory
from chameleon_ft.errors import PlanError
from chameleon_ft.lab import paper
from chameleon_ft.plan import Plan
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, list_schedule, replay
from chameleon_ft.schedule.network import pipeline_times
from chameleon_ft.workload import LayerCost, Workload
from tests.cost.programs import one_f_one_b, stage_bytes
from tests.golden import refused
from tests.strategies import Planned, Shape, equal_costs, pipelined, pipelines, seconds, shapes


def symmetric_step_s(*, stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Equal pipelines: (N_pp + N_m - 1) (t_f + t_b), for `micro_batches` (N_m) in each."""
    return (stages + micro_batches - 1) * (forward_s + backward_s)


@given(shape=shapes, forward_s=seconds, backward_s=seconds)
def test_equal_pipelines_take_what_the_paper_says(shape: Shape, forward_s: float, backward_s: float) -> None:
    costs = equal_costs(
        layers=shape.pp,
        micro_batches=shape.dp * shape.share,
        workers=shape.dp * shape.pp,
        forward_s=forward_s,
        input_grad_s=backward_s,
        weight_grad_s=0.0,
    )

    closed_form_s = symmetric_step_s(
        stages=shape.pp, micro_batches=shape.share, forward_s=forward_s, backward_s=backward_s
    )

    assert replay(list_schedule(pipelines(shape), costs), costs).step_s == pytest.approx(closed_form_s)
    assert paper.pipeline_step_s(
        forward_s=(forward_s,) * shape.pp, backward_s=(backward_s,) * shape.pp, micro_batches=shape.share
    ) == pytest.approx(closed_form_s)


@given(pipelined())
def test_unequal_pipelines_take_what_a_replay_of_1f1b_with_free_messages_does(case: Planned) -> None:
    plan = Plan(case.plan.placement, case.plan.routes)
    free = Link(0.0, math.inf)
    costs = CostModel(case.costs.workload, Cluster(case.costs.cluster.workers, free, free))
    ways = list(dict.fromkeys(route.hops for route in plan.routes))
    times = [pipeline_times(way, costs) for way in ways]
    shares = [sum(route.hops == way for route in plan.routes) for way in ways]

    found_s = paper.unequal_step_s(
        [(each.forward_s, each.backward_s, share) for each, share in zip(times, shares, strict=True)]
    )

    assert found_s == pytest.approx(replay(one_f_one_b(plan), costs).step_s)


def test_rerouting_without_a_failure_is_the_symmetric_form() -> None:
    assert paper.rerouted_step_s(
        stages=4, micro_batches=8, pipelines=3, failures=(0, 0, 0, 0), forward_s=1.0, backward_s=2.0
    ) == symmetric_step_s(stages=4, micro_batches=8, forward_s=1.0, backward_s=2.0)


def test_one_failure_takes_longer_than_the_sum_says() -> None:
    """The known disagreement: 8 pipelines of 4 stages, 16 micro-batches each, one worker lost."""
    plan = pipelines(Shape(dp=8, pp=4, share=16))
    costs = equal_costs(layers=4, micro_batches=128, workers=32, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    replayed_s = replay(list_schedule(reroute(plan, [1], costs), costs), costs).step_s

    paper_s = paper.rerouted_step_s(
        stages=4, micro_batches=16, pipelines=8, failures=(0, 1, 0, 0), forward_s=1.0, backward_s=2.0
    )

    assert paper_s == pytest.approx((19 + 16 / 7) * 3)
    assert paper_s < replayed_s


@pytest.mark.parametrize("failures", [(0, 3), (0, -1), (1,)])
def test_a_stage_without_workers_cannot_be_rerouted(failures: tuple[int, ...]) -> None:
    with pytest.raises(PlanError):
        paper.rerouted_step_s(stages=2, micro_batches=4, pipelines=3, failures=failures, forward_s=1.0, backward_s=1.0)


@pytest.mark.parametrize("stage", range(4))
def test_memory_of_a_stage_is_that_of_the_replay_when_there_are_enough_micro_batches(stage: int) -> None:
    plan = pipelines(Shape(dp=1, pp=4, share=8))
    layer = LayerCost(
        "layer", 1.0, 1.0, 1.0, param_bytes=20, gradient_bytes=20, optimizer_bytes=60, activation_bytes=100
    )
    costs = equal_costs(layers=4, micro_batches=8, workers=4)

    replayed = program_memory(list_schedule(plan, costs), plan.placement, Workload((layer,) * 4, 8, 1))

    assert replayed[stage].peak_bytes == stage_bytes(
        stage=stage, stages=4, layers=1, state_bytes=100, activation_bytes=100
    )


@given(st.floats(0.0, 100.0), st.floats(0.1, 100.0))
def test_samples_per_second_are_those_of_the_time_that_is_left(transition_s: float, until_failure_s: float) -> None:
    found = paper.samples_per_second(
        samples=512, step_s=2.0, transition_s=transition_s, until_failure_s=until_failure_s
    )

    assert 0 <= found <= 256
    assert (found == 0) == (transition_s >= until_failure_s)


def test_a_pipeline_needs_both_times_of_every_stage() -> None:
    with refused(PlanError):
        paper.pipeline_step_s(forward_s=(1.0, 1.0), backward_s=(1.0,), micro_batches=2)
