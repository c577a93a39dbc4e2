"""Presets whose state takes most of the memory of the workers: plans and messages of the search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.search import find_plan
from chameleon_ft.storage.profiles import read_profile


def preset(model: str, name: str, workers: int, micro_batches: int) -> CostModel:
    rates = device(name)
    workload = derive_workload(model_shape(model), rates, micro_batch_size=1, micro_batches=micro_batches)
    return CostModel(workload, rates.cluster(workers, workers_per_host=8))


# Seconds of one pipeline with split backward, 1F1B limits and its first stages recomputing, laid out by hand.
@pytest.mark.parametrize(
    ("model", "name", "workers", "micro_batches", "by_hand_s"),
    [
        ("llama2-70b", "h100-80g", 32, 128, 22.8),
        ("llama2-70b", "ascend-910b-64g", 40, 80, 28.7),
        ("qwen2.5-32b", "ascend-910b-64g", 32, 128, 25.79 / 1.11),
    ],
)
def test_a_layout_by_hand_is_never_faster_where_memory_is_short(
    model: str, name: str, workers: int, micro_batches: int, by_hand_s: float
) -> None:
    costs = preset(model, name, workers, micro_batches)
    found = find_plan(costs)
    assert found.best.step_s <= by_hand_s
    assert found.bound_s <= found.best.step_s
    estimate = estimate_step(
        found.best.plan,
        best_program(found.best.plan, costs, in_flight_limits=found.best.in_flight_limits).program,
        costs,
    )
    assert not estimate.over_capacity(costs)


def test_where_memory_is_short_selective_recomputation_is_faster_than_recomputation_in_full() -> None:
    costs = preset("llama2-70b", "ascend-910b-64g", 40, 80)
    in_full = [replace(layer, selective_bytes=None) for layer in costs.workload.layers]
    without = replace(costs, workload=replace(costs.workload, layers=tuple(in_full)))

    found = find_plan(costs).best

    assert found.step_s < 0.95 * find_plan(without).best.step_s
    assert any(own.num_selective for own in found.plan.recompute.values())


@pytest.mark.parametrize("workers", [8, 9, 24])
def test_the_time_of_a_plan_is_that_of_its_best_program_under_its_limits(workers: int) -> None:
    costs = preset("llama2-7b", "h100-80g", workers, 4 * workers)
    for each in (found := find_plan(costs)).best, *found.alternatives:
        assert best_program(each.plan, costs, in_flight_limits=each.in_flight_limits).step_s == pytest.approx(
            each.program_s, rel=1e-9
        )


def test_a_model_fits_with_more_micro_batches_than_are_in_flight() -> None:
    costs = preset("llama2-70b", "h100-80g", 24, 1_024)
    found = find_plan(costs)
    assert found.best.peak_bytes <= 80 * 10**9
    assert found.best.plan.recompute


def test_a_worker_stays_idle_where_equal_pipelines_reduce_their_gradients_sooner() -> None:
    costs = preset("llama2-7b", "h100-80g", 9, 36)
    equal = find_plan(CostModel(costs.workload, costs.cluster.without([8])))
    assert find_plan(costs).best.step_s <= equal.best.step_s * (1 + 1e-9)


@pytest.mark.parametrize("slow", [{10: 0.63}, {7: 0.63}, {3: 0.55, 19: 0.67}])
def test_a_plan_with_slow_workers_is_no_slower_than_one_without_them(slow: dict[int, float]) -> None:
    profile = read_profile(Path(__file__).parents[2] / "profiles" / "llama2-7b-h100-80g.json")
    hosts = {worker: f"host{worker // 8}" for worker in range(32)}
    costs = CostModel(profile.workload(128), profile.cluster(hosts, speeds=slow))
    left = CostModel(costs.workload, costs.cluster.without(slow))
    with_them, without = (find_plan(each, min_holders=2).best.step_s for each in (costs, left))
    assert with_them <= without
