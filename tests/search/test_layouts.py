"""The most promising layouts of about equal depth."""

from __future__ import annotations

import random

import pytest

from chameleon_ft.search.bounds import SyncLowerBound
from chameleon_ft.search.mixes import promising_layouts
from chameleon_ft.search.pipelines import PipelineScheduler, PipelineSearch
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerPool
from tests.search.instances import instance, with_gradients


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fewest", [1, 2, 3])
def test_layouts_of_every_depth_and_number_that_the_workers_allow(seed: int, fewest: int) -> None:
    rng = random.Random(seed)
    costs = with_gradients(instance(rng, workers=7, layers=5, micro_batches=6, kinds=1, memory=False), rng)
    options = SearchOptions(min_holders=fewest)
    pool = WorkerPool.of(costs.cluster)
    searches = [
        PipelineSearch(PipelineScheduler(Stages(costs, pool.classes, split_backward=split), pool, options), options)
        for split in (True, False)
    ]
    least = SyncLowerBound(costs, 1e9)
    found = promising_layouts(searches, 7, least, options, costs.workload)
    assert sorted((each.depth, each.number, each.pipelines is searches[0]) for each in found) == sorted(
        (depth, number, split)
        for split in (True, False)
        for depth in range(1, 6)
        for number in range(fewest, min(7 // depth, 6) + 1)
    )
    estimates_s = [each.estimate_s for each in found]
    assert estimates_s == sorted(estimates_s)
    assert all(each.shapes(mixed=True)[0] == (0,) * each.depth for each in found)
