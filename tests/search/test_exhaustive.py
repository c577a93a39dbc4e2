"""Small clusters with several hosts and gradient sync, beside every placement of pipelines on their workers."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import InfeasibleError, find_plan
from tests.search.instances import instance, with_gradients
from tests.search.oracle import min_placed_s


def on_hosts(seed: int) -> CostModel:
    """Two to four workers on one to three hosts, with slow links between them."""
    rng = random.Random(seed)
    workers, layers, micro_batches = rng.randint(2, 4), rng.randint(2, 4), rng.randint(1, 4)
    kinds, memory = rng.choice([1, 1, 2]), rng.random() < 0.5
    costs = instance(rng, workers=workers, layers=layers, micro_batches=micro_batches, kinds=kinds, memory=memory)
    costs = with_gradients(costs, rng)
    hosts = rng.choice([1, 2, 2, 3])
    near = Link(rng.choice([0.0, 0.05]), rng.choice([math.inf, 100.0, 30.0]))
    far = Link(rng.choice([0.05, 0.5]), rng.choice([20.0, 5.0]))
    placed = (dataclasses.replace(own, host=f"host {rng.randrange(hosts)}") for own in costs.cluster.workers)
    return CostModel(costs.workload, Cluster(tuple(placed), near, far))


@pytest.mark.parametrize("seed", range(40))
def test_no_placement_of_any_pipelines_is_faster(seed: int) -> None:
    costs = on_hosts(seed)
    best_s = min_placed_s(costs)
    try:
        found = find_plan(costs)
    except InfeasibleError:
        assert best_s == math.inf
        return
    assert found.best.step_s <= best_s * (1 + 1e-9)
    assert found.bound_s <= best_s * (1 + 1e-9)
