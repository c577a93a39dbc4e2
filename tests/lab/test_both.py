"""Properties of the plans of both published planners, Oobleck's and the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.errors import PlanError
from chameleon_ft.lab.oobleck import oobleck_plan
from chameleon_ft.lab.paper import paper_plan
from chameleon_ft.lab.planned_layouts import BaselinePlan
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.workload import LayerCost, Workload
from tests.examples import examples
from tests.golden import refused
from tests.lab.test_paper import small
from tests.search.oracle import Exhaustive

Planner = Callable[..., BaselinePlan | None]

planners = st.sampled_from([oobleck_plan, paper_plan])
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=examples(120), deadline=None)
@given(planner=planners, seed=seeds, split=st.booleans())
def test_its_plan_is_whole_and_fits(planner: Planner, seed: int, split: bool) -> None:
    costs = small(seed, workers=9, layers=6, micro_batches=20)
    chosen = planner(costs, split_backward=split)
    if chosen is None:
        return
    plan = chosen.found.plan
    assert chosen.found.name == planner.__name__.removesuffix("_plan")
    assert plan.split_backward is split
    assert plan.workers == tuple(worker.id for worker in costs.cluster.workers)
    assert plan.micro_batches == costs.workload.micro_batches
    estimate = estimate_step(
        plan, best_program(plan, costs, in_flight_limits=chosen.found.in_flight_limits).program, costs
    )
    assert not estimate.over_capacity(costs)
    capacities = [worker.memory_bytes for worker in costs.cluster.workers]
    assert all(capacity is None or chosen.found.peak_bytes <= capacity for capacity in capacities)


@settings(max_examples=examples(80), deadline=None)
@given(planner=planners, seed=seeds, split=st.booleans(), kinds=st.integers(1, 2))
def test_it_is_never_faster_than_the_fastest_pipelines(planner: Planner, seed: int, split: bool, kinds: int) -> None:
    costs = small(seed, workers=5, layers=4, micro_batches=5, kinds=kinds)
    chosen = planner(costs, split_backward=split)
    if chosen is not None:
        assert chosen.found.step_s >= Exhaustive(costs).min_s() * (1 - 1e-9)


def test_find_plan_is_never_slower() -> None:
    compared = 0
    for seed in range(40):
        costs = small(seed, workers=8, layers=5, micro_batches=12)
        chosen = [
            each
            for split in (False, True)
            for each in (
                oobleck_plan(costs, split_backward=split),
                oobleck_plan(costs, fault_tolerance=1, split_backward=split),
                paper_plan(costs, split_backward=split),
            )
            if each is not None
        ]
        try:
            found = find_plan(costs, effort=None)
        except InfeasibleError:
            assert not chosen
            continue
        assert found.exhaustive
        compared += len(chosen)
        for each in chosen:
            assert found.best.step_s <= each.found.step_s * (1 + 1e-9)
    assert compared > 90


@pytest.mark.parametrize("planner", [oobleck_plan, paper_plan])
def test_no_worker_is_left_to_plan_for(planner: Planner) -> None:
    free = Link(0.0, math.inf)
    workload = Workload((LayerCost("layer", 1.0, 1.0, 1.0),), 2, 1)
    with refused(PlanError):
        planner(CostModel(workload, Cluster((), free, free)))
