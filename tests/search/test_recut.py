"""Pipelines that are whole stay; broken ones are cut anew."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.search import FoundPlan, recut_plan
from tests.examples import examples
from tests.search.instances import instance


def recut_after(costs: CostModel, *, dp: int, pp: int, lost: tuple[int, ...], split: bool) -> FoundPlan | None:
    before = data_pipeline_plan(layer_costs=[1.0] * len(costs.workload.layers), dp=dp, pp=pp, micro_batches=dp)
    live = CostModel(costs.workload, costs.cluster.without(lost))
    return recut_plan(live, before.placement, split_backward=split)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.booleans())
def test_only_workers_of_broken_pipelines_receive_anything(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    dp, pp = rng.randint(2, 4), rng.randint(1, 4)
    costs = instance(
        rng, workers=dp * pp, layers=rng.randint(pp, 6), micro_batches=rng.randint(dp, 12), kinds=1, memory=False
    )
    costs = CostModel(
        costs.workload,
        Cluster(
            tuple(dataclasses.replace(worker, host=f"host {worker.id // 4}") for worker in costs.cluster.workers),
            costs.cluster.intra_host,
            costs.cluster.inter_host,
        ),
    )
    lost = tuple(rng.sample(range(dp * pp), rng.randint(1, 2)))
    broken = {worker // pp for worker in lost}
    found = recut_after(costs, dp=dp, pp=pp, lost=lost, split=split)
    rest = dp * pp - len(broken) * pp
    if found is None:
        assert len(broken) == dp
        return
    before = data_pipeline_plan(layer_costs=[1.0] * len(costs.workload.layers), dp=dp, pp=pp, micro_batches=dp)
    plan = found.plan
    assert plan.micro_batches == costs.workload.micro_batches
    assert not set(lost) & set(plan.workers)
    # Workers of equal stages may have changed places between pipelines, so it is their number that counts.
    kept = [worker for worker in plan.workers if plan.placement.ranges_of(worker) == before.placement.ranges_of(worker)]
    assert len(kept) >= rest
    estimate = estimate_step(plan, best_program(plan, costs, in_flight_limits=found.in_flight_limits).program, costs)
    assert estimate.step_s > 0


def test_a_loss_moves_less_than_a_stage_for_each_live_worker() -> None:
    workload = derive_workload(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1, micro_batches=128)
    costs = CostModel(workload, device("h100-80g").cluster(32))
    found = recut_after(costs, dp=8, pp=4, lost=(5,), split=True)
    assert found is not None
    depths = sorted({len(route.hops) for route in found.plan.routes})
    assert depths == [3, 4]
    state = sum(layer.param_bytes + layer.optimizer_bytes for layer in workload.layers)
    assert 0 < found.moved_bytes < state * 3 / 4


def test_deep_pipelines_of_few_micro_batches_are_searched_in_seconds() -> None:
    workload = derive_workload(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1, micro_batches=2)
    costs = CostModel(workload, device("h100-80g").cluster(16))
    found = recut_after(costs, dp=2, pp=8, lost=(3,), split=True)
    assert found is not None
    assert {len(route.hops) for route in found.plan.routes} == {7, 8}
