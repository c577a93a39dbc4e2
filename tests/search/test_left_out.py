"""Workers and hosts that stay idle because the others are faster without them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import find_plan
from chameleon_ft.workload import LayerCost, Workload

PRESET = derive_workload(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1, micro_batches=64)


def test_a_worker_that_would_slow_the_rest_stays_idle() -> None:
    link = Link(0.0, math.inf)
    layer = LayerCost("layer", 1.0, 1.0, 1.0)
    workers = (Worker(0, "host"), Worker(1, "host"), Worker(2, "host", speed=0.01))
    costs = CostModel(Workload((layer,) * 2, 4, 1), Cluster(workers, link, link))
    found = find_plan(costs, effort=None)
    assert found.best.plan.workers == (0, 1)
    assert found.best.step_s == pytest.approx(2 * 2 * 3)


def reducing(layer: LayerCost, *, layers: int, micro_batches: int, cluster: Cluster) -> CostModel:
    return CostModel(Workload((dataclasses.replace(layer, gradient_bytes=100),) * layers, micro_batches, 1), cluster)


def test_workers_stay_idle_where_reducing_takes_longer_than_they_save() -> None:
    layer = LayerCost("layer", 0.1, 0.1, 0.1)
    link = Link(1.0, 10.0)
    costs = reducing(
        layer, layers=4, micro_batches=9, cluster=Cluster(tuple(Worker(n, f"{n}") for n in range(9)), link, link)
    )
    found = find_plan(costs)
    assert len({route.hops for route in found.best.plan.routes}) == 1
    assert found.best.step_s <= 9 * 4 * 0.3, "what one worker alone takes"


def test_a_worker_that_slows_the_others_is_left_out_where_gradients_are_reduced() -> None:
    cluster = device("h100-80g").cluster(8)
    slow = Cluster(
        tuple(dataclasses.replace(worker, speed=0.1 if worker.id == 3 else 1.0) for worker in cluster.workers),
        cluster.intra_host,
        cluster.inter_host,
    )
    without = find_plan(CostModel(PRESET, cluster.without([3])))
    assert find_plan(CostModel(PRESET, slow)).best.step_s <= without.best.step_s * (1 + 1e-9)


@pytest.mark.parametrize(("far_bytes_per_s", "left_out"), [(1.25e9, True), (50e9, False)])
def test_a_worker_alone_on_its_host_reduces_nothing_where_links_to_it_are_slow(
    far_bytes_per_s: float, left_out: bool
) -> None:
    rates = device("h100-80g").cluster(9, workers_per_host=8)
    cluster = Cluster(rates.workers, rates.intra_host, Link(1e-5, far_bytes_per_s))
    workload = dataclasses.replace(PRESET, micro_batches=128)
    result = find_plan(CostModel(workload, cluster))
    alone = find_plan(CostModel(workload, cluster.without([8])))
    placement = result.best.plan.placement
    in_rings = any(placement.holders(layer) != (8,) for held in placement.ranges.get(8, ()) for layer in held)
    assert in_rings is not left_out
    assert result.best.step_s <= alone.best.step_s * (1 + 1e-9)
    assert result.bound_s <= result.best.step_s


def test_fewer_hosts_are_used_where_rings_between_hosts_are_slow() -> None:
    # One layer, so that all workers that train hold the same.
    layer = LayerCost("layer", 0.01, 0.01, 0.01, gradient_bytes=90)
    workers = tuple(Worker(number, f"host {number // 2}") for number in range(4))
    cluster = Cluster(workers, Link(0.0, 1000.0), Link(0.0, 1.0))
    result = find_plan(CostModel(Workload((layer,), 8, 1), cluster))
    assert result.best.step_s == pytest.approx(4 * 0.03 + 90 / 1000)
