"""Plans with so many holders of each layer, and plans that survive the loss of any host."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import FoundPlan, InfeasibleError, find_plan
from chameleon_ft.workload import LayerCost, Workload
from tests.golden import refused
from tests.search.instances import instance, with_gradients

PRESET = derive_workload(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1, micro_batches=64)


@pytest.mark.parametrize("min_holders", [2, 4])
def test_every_layer_has_as_many_holders_as_are_asked_for(min_holders: int) -> None:
    costs = CostModel(PRESET, device("h100-80g").cluster(16).without([7, 14]))
    found = find_plan(costs, min_holders=min_holders)
    fewest = [each.plan.placement.fewest_holders for each in (found.best, *found.alternatives)]
    assert min(fewest) >= min_holders
    unconstrained = fastest_without(7, 14)
    assert found.best.step_s >= unconstrained.step_s
    assert found.bound_s <= unconstrained.step_s


@cache
def fastest_without(*lost: int) -> FoundPlan:
    return find_plan(CostModel(PRESET, device("h100-80g").cluster(16).without(lost))).best


@pytest.mark.parametrize("effort", [None, 300])
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_with_so_many_holders_is_found_if_there_is_one(seed: int, kinds: int, effort: int | None) -> None:
    rng = random.Random(seed)
    costs = instance(rng, workers=4, layers=3, micro_batches=4, kinds=kinds, memory=False)
    costs = with_gradients(costs, rng) if seed % 2 else costs
    steps_s = []
    for least in (1, 2, 3, 4):
        found = find_plan(costs, min_holders=least, effort=effort)
        assert found.best.plan.placement.fewest_holders >= least
        steps_s.append(found.best.step_s)
    if effort is None:
        assert steps_s == sorted(steps_s)
    with refused(InfeasibleError):
        find_plan(costs, min_holders=5, effort=effort)


def on_hosts(hosts: int, each: int, *, slower: float) -> CostModel:
    """Four layers of much gradient for so many workers, with links that are as much slower between hosts."""
    layers = (LayerCost("layer", 1.0, 1.0, 1.0, gradient_bytes=400, param_bytes=400, output_bytes=1),) * 4
    workers = tuple(Worker(number, f"host {number // each}") for number in range(hosts * each))
    cluster = Cluster(workers, Link(0.0, 1000.0), Link(0.0, 1000.0 / slower))
    return CostModel(Workload(layers, 4 * hosts * each, 1), cluster)


@pytest.mark.parametrize("effort", [2_000, None])
def test_an_alternative_survives_the_loss_of_any_host(effort: int | None) -> None:
    result = find_plan(on_hosts(2, 2, slower=30.0), effort=effort)
    assert result.best.host_single_points_of_failure == 2
    survivors = [each for each in result.alternatives if not each.host_single_points_of_failure]
    assert survivors
    for each in (result.best, *survivors):
        hosts = {worker: worker // 2 for worker in each.plan.workers}
        lost = {
            host
            for host in set(hosts.values())
            if each.plan.placement.without([worker for worker in hosts if hosts[worker] == host]).unheld_layers
        }
        assert len(lost) == each.host_single_points_of_failure


def test_no_alternative_is_added_where_the_fastest_survives_any_host() -> None:
    result = find_plan(on_hosts(4, 2, slower=1.0))
    assert result.best.host_single_points_of_failure == 0
    assert result.alternatives == ()


def test_of_equal_plans_the_one_with_fewer_host_single_points_of_failure_is_best() -> None:
    # No worker has room for two layers, and two workers share the first: no pipelines are as fast.
    layers = (LayerCost("long", 2.0, 2.0, 2.0, param_bytes=10), LayerCost("short", 1.0, 1.0, 1.0, param_bytes=10))
    workers = tuple(Worker(number, host, memory_bytes=19) for number, host in enumerate(("a", "a", "b")))
    link = Link(0.0, math.inf)
    costs = CostModel(Workload(layers, 8, 1), Cluster(workers, link, link))
    long, short = LayerRange(0, 1), LayerRange(1, 2)

    def shared(first: int, second: int, last: int) -> Plan:
        placement = Placement(2, {first: (long,), second: (long,), last: (short,)})
        ways = ((Hop(first, long), Hop(last, short)), (Hop(second, long), Hop(last, short)))
        return Plan(placement, tuple(Route(number, ways[number % 2]) for number in range(8)))

    result = find_plan(costs, others={"two": shared(0, 1, 2), "one": shared(0, 2, 1)})
    assert (result.best.name, result.best.host_single_points_of_failure) == ("one", 1)
    assert all(each.step_s > result.best.step_s for each in result.alternatives)
