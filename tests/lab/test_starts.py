"""Equal pipelines to begin with."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.lab.planned_layouts import equal_layouts
from chameleon_ft.schedule import CostModel, best_program
from tests.examples import examples
from tests.search.instances import instance

FREE = Link(0.0, math.inf)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.booleans())
def test_they_are_equal_and_fit(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    costs = instance(rng, workers=rng.randint(1, 9), layers=5, micro_batches=12, kinds=1, memory=rng.random() < 0.6)
    depths = []
    for found in equal_layouts(costs, split_backward=split):
        plan = found.plan
        pipelines = Counter(route.hops for route in plan.routes)
        (depth,) = {len(hops) for hops in pipelines}
        depths.append(depth)
        assert found.name == f"{len(pipelines)} x {depth}"
        assert len({tuple(hop.layers for hop in hops) for hops in pipelines}) == 1
        assert max(pipelines.values()) - min(pipelines.values()) <= 1
        estimate = estimate_step(
            plan, best_program(plan, costs, in_flight_limits=found.in_flight_limits).program, costs
        )
        assert not estimate.over_capacity(costs)
        assert found.step_s == pytest.approx(estimate.step_s)
        assert split or not plan.split_backward
    assert depths == sorted(set(depths))


@pytest.mark.parametrize(
    ("workers", "names"),
    [(8, ["4 x 2", "2 x 4", "1 x 8"]), (7, ["3 x 2", "2 x 3", "1 x 6", "1 x 7"]), (2, ["1 x 2"])],
)
def test_all_workers_are_used_unless_there_is_no_choice_of_depths(workers: int, names: list[str]) -> None:
    """One worker cannot hold the model, and seven only make a single pipeline."""
    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=16)
    costs = CostModel(workload, rates.cluster(workers))
    assert [found.name for found in equal_layouts(costs, split_backward=False)] == names


def test_backward_is_fused_where_split_backward_does_not_fit() -> None:
    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-70b"), rates, micro_batch_size=1, micro_batches=32)
    found = equal_layouts(CostModel(workload, rates.cluster(32)), split_backward=True)
    assert {plan.name for plan in found} >= {"1 x 32"}
    assert all(plan.plan.recompute for plan in found)


def test_nothing_fits() -> None:
    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=4)
    cluster = Cluster(tuple(Worker(number, "host", memory_bytes=10**9) for number in range(4)), FREE, FREE)
    assert equal_layouts(CostModel(workload, cluster), split_backward=False) == []
