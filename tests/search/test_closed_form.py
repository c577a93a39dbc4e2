"""The formula against the bounds that it stands in for."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.search._bounds import Pipelines, SyncCost
from chameleon_ft.search._kinds import Crew
from chameleon_ft.search._shapes import shapes_of
from tests.search.instances import instance, with_gradients


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.booleans())
def test_it_rules_out_nothing_that_the_bounds_allow(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    workers, layers = rng.randint(1, 5), rng.randint(1, 5)
    costs = instance(
        rng, workers=workers, layers=layers, micro_batches=9, kinds=rng.randint(1, 3), memory=rng.random() < 0.3
    )
    sync = SyncCost()
    if rng.random() < 0.5:
        costs = with_gradients(costs, rng)
        sync = SyncCost(rng.choice([0.0, 0.3]), rng.uniform(0.0, 0.1))
    crew = Crew.of(costs.cluster)
    bounds = Pipelines(costs, crew.kinds, split_backward=split).bounds(sync)
    for depth in range(1, layers + 1):
        for count in (1, 4, 9):
            formula_s = bounds.pipelines.closed_form.least_s(depth, count, sync.per_byte_s)
            assert formula_s <= bounds.least_s((0,) * depth, count)
    for shape in shapes_of(crew.counts, layers)[0]:
        time_s = rng.uniform(0.5, 1.5) * max(0.1, bounds.pipelines.bounds(SyncCost()).least_s(shape[:1], 1))
        for wait_s in (time_s, 3 * time_s, 9 * time_s):
            if wait_s < 1e9:
                most = bounds.most_by_closed_form(shape, wait_s, 9)
                assert bounds.most(shape, wait_s, 9) <= most
                assert bounds.closed_forms((shape, shape[:1]), 9).most(wait_s)[0] == most
