"""The choice among micro-batch sizes, against a search of each size and against trying everything."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import InfeasibleError, SizeFigures, find_plan, find_plan_of_sizes
from tests.examples import examples
from tests.golden import refused
from tests.search.instances import instance, with_gradients
from tests.search.oracle import Exhaustive

seeds = st.integers(0, 2**32 - 1)


def of_size(costs: CostModel, size: int, rng: random.Random) -> CostModel:
    """Costs of larger micro-batches, which take up to as long as their samples one by one."""
    time = size ** rng.choice([0.3, 0.8, 1.0])
    layers = tuple(
        dataclasses.replace(
            layer.slowed(time),
            activation_bytes=size * layer.activation_bytes,
            weight_grad_bytes=size * layer.weight_grad_bytes,
            output_bytes=size * layer.output_bytes,
            working_bytes=size * layer.working_bytes,
        )
        for layer in costs.workload.layers
    )
    count = costs.workload.micro_batches // size
    workload = dataclasses.replace(costs.workload, layers=layers, micro_batches=count, micro_batch_size=size)
    return CostModel(workload, costs.cluster)


def several(seed: int, *, workers: int = 4, layers: int = 3) -> list[CostModel]:
    """Costs of micro-batches of 1, 2 and 4 samples of a global batch of 4."""
    rng = random.Random(seed)
    costs = instance(
        rng,
        workers=rng.randint(1, workers),
        layers=rng.randint(1, layers),
        micro_batches=4,
        kinds=rng.choice([1, 1, 2]),
        memory=rng.random() < 0.6,
    )
    sizes = [of_size(costs, size, rng) for size in (1, 2, 4)]
    rng.shuffle(sizes)
    return sizes


@settings(max_examples=examples(60), deadline=None)
@given(seed=seeds)
def test_a_complete_choice_equals_trying_everything(seed: int) -> None:
    costs = several(seed)
    min_s = {each.workload.micro_batch_size: Exhaustive(each).min_s() for each in costs}
    if min(min_s.values()) == math.inf:
        with pytest.raises(InfeasibleError):
            find_plan_of_sizes(costs, effort=None)
        return
    found = find_plan_of_sizes(costs, effort=None)
    assert found.best.step_s <= min(min_s.values()) * (1 + 1e-9)
    assert found.exhaustive
    assert found.bound_s <= found.best.step_s * (1 + 1e-9)
    assert [each.micro_batch_size for each in found.sizes] == [1, 2, 4]
    for each in found.sizes:
        own_s = min_s[each.micro_batch_size]
        assert each.bound_s <= own_s * (1 + 1e-9)
        if each.step_s is None:
            assert own_s >= found.best.step_s * (1 - 1e-9)
        else:
            # Swapping operations may make it faster than all that list scheduling finds.
            assert each.bound_s * (1 - 1e-9) <= each.step_s <= own_s * (1 + 1e-9)


@settings(max_examples=examples(30), deadline=None)
@given(seed=seeds)
def test_the_choice_is_the_best_of_separate_searches(seed: int) -> None:
    rng = random.Random(seed)
    costs = with_gradients(
        instance(rng, workers=rng.randint(2, 6), layers=4, micro_batches=8, kinds=rng.choice([1, 2]), memory=True), rng
    )
    hosts = tuple(dataclasses.replace(worker, host=f"host {worker.id % 2}") for worker in costs.cluster.workers)
    cluster = Cluster(hosts, Link(0.0, 50.0), Link(rng.choice([0.0, 0.5]), 20.0))
    sizes = [of_size(CostModel(costs.workload, cluster), size, rng) for size in (1, 2, 4, 8)]
    steps_s = {}
    for each in sizes:
        try:
            steps_s[each.workload.micro_batch_size] = find_plan(each).best.step_s
        except InfeasibleError:
            steps_s[each.workload.micro_batch_size] = math.inf
    if min(steps_s.values()) == math.inf:
        with pytest.raises(InfeasibleError):
            find_plan_of_sizes(sizes)
        return
    found = find_plan_of_sizes(sizes)
    assert found.best.step_s == min(steps_s.values())
    assert found.bound_s <= found.best.step_s
    size = 8 // found.best.plan.micro_batches
    assert steps_s[size] == found.best.step_s
    for own in found.sizes:
        assert own.step_s in (None, steps_s[own.micro_batch_size])
        assert own.bound_s <= steps_s[own.micro_batch_size]


def preset(size: int, samples: int = 64, model: str = "llama2-13b") -> CostModel:
    rates = device("h100-80g")
    workload = derive_workload(model_shape(model), rates, micro_batch_size=size, micro_batches=samples // size)
    return CostModel(workload, rates.cluster(8))


def test_sizes_that_cannot_be_better_are_not_searched() -> None:
    found = find_plan_of_sizes([preset(size) for size in (16, 4, 2, 1)])
    alone = find_plan(preset(1))
    assert found.best == alone.best
    assert (found.bound_s, found.mixes) == (alone.bound_s, alone.mixes)
    first, *others = found.sizes
    assert first == SizeFigures(1, alone.bound_s, alone.best.step_s)
    assert all(each.step_s is None and each.bound_s >= alone.best.step_s for each in others)


def test_a_size_that_does_not_fit_is_distinguished_from_a_slow_one() -> None:
    sizes = {each.micro_batch_size: each for each in find_plan_of_sizes([preset(1), preset(64)]).sizes}
    assert sizes[64] == SizeFigures(64, math.inf, None)
    assert find_plan_of_sizes([preset(1)]).best == find_plan(preset(1)).best


def test_costs_that_cannot_be_compared_are_refused() -> None:
    for costs in (
        [],
        [preset(1), preset(1)],
        [preset(1), preset(2, samples=66)],
        [preset(1), preset(2, model="llama2-7b")],
        [preset(1), CostModel(preset(2).workload, preset(2).cluster.without([3]))],
    ):
        with refused(ConfigError):
            find_plan_of_sizes(costs)
    with refused(PlanError):
        find_plan_of_sizes([CostModel(preset(size).workload, Cluster((), Link(0, 1), Link(0, 1))) for size in (1, 2)])
    one_worker = preset(1).cluster.without(range(1, 8))
    with refused(InfeasibleError):
        find_plan_of_sizes([CostModel(preset(size).workload, one_worker) for size in (1, 2)])
