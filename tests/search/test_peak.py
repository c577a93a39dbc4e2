"""What scheduled pipelines hold, against what is known of the operations of any schedule."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from chameleon_ft.estimate.memory import schedule_bytes, stages_of
from chameleon_ft.plan import Hop, LayerRange, Placement
from chameleon_ft.schedule._network import NetworkBuilder
from chameleon_ft.schedule._pipelines import rough_schedule
from chameleon_ft.search._peak import peak_bytes
from tests.search.instances import instance
from tests.search.oracle import cuts


@pytest.mark.parametrize("seed", range(100))
def test_the_worker_that_needs_most_is_that_of_the_network(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 6)
    costs = instance(rng, workers=layers, layers=layers, micro_batches=1, kinds=1, memory=False)
    stops = rng.choice(list(cuts(layers, rng.randint(1, layers))))
    ranges = [LayerRange(*pair) for pair in pairwise((0, *stops))]
    hops = tuple(map(Hop, rng.sample(range(layers), len(stops)), ranges))
    workers = [hop.worker for hop in hops]
    recompute = rng.random() < 0.4
    builder = NetworkBuilder(costs, split_backward=rng.random() < 0.6, recompute=workers if recompute else ())
    depth = len(hops)
    found = rough_schedule(hops, rng.choice([1, 2, 5, 9]), builder, ceiling=np.full((2, depth), 2 * depth))
    stages = stages_of(costs.workload)
    moving = schedule_bytes(found.schedule(), stages, recompute=workers if recompute else ())
    state = stages.state_bytes(Placement(layers, {hop.worker: (hop.layers,) for hop in hops}))
    wanted = max(state[worker] + own for worker, own in zip(workers, moving, strict=True))
    assert peak_bytes(found, ranges, stages, recompute=recompute) == wanted
