"""Mixes of a number of pipelines against trying every number of every depth."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import PipelineBounds, Pipelines, SyncCost
from chameleon_ft.search._closed_form import _largest_stage_s
from chameleon_ft.search._depth_mixes import DepthMixes
from chameleon_ft.search._kinds import Crew
from chameleon_ft.search._shapes import shapes_of
from tests.search.instances import instance, with_gradients
from tests.search.oracle import cuts


def both(costs: CostModel, sync: SyncCost, *, split: bool) -> list[PipelineBounds]:
    """Of pipelines that do not recompute, and of those that do where memory is known."""
    kinds = Crew.of(costs.cluster).kinds
    models = [costs]
    if kinds[0].memory_bytes is not None:
        models.append(CostModel(costs.workload.recomputed(), costs.cluster))
    return [Pipelines(model, kinds, split_backward=split).bounds(sync) for model in models]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.booleans(), fewest=st.integers(1, 4), more=st.integers(0, 3))
def test_no_mix_by_bounds_does_more(seed: int, split: bool, fewest: int, more: int) -> None:
    rng = random.Random(seed)
    workers, micro_batches = rng.randint(1, 7), rng.randint(1, 20)
    costs = instance(
        rng,
        workers=workers,
        layers=rng.randint(1, 6),
        micro_batches=micro_batches,
        kinds=1,
        memory=rng.random() < 0.6,
    )
    sync = SyncCost()
    if rng.random() < 0.5:
        costs = with_gradients(costs, rng)
        sync = SyncCost(rng.choice([0.0, 0.3]), rng.uniform(0.0, 0.1))
    shapes, _ = shapes_of((workers,), len(costs.workload.layers))
    bounds = both(costs, sync, split=split)
    mixes = DepthMixes(bounds, shapes, workers, (fewest, min(fewest + more, workers)))
    active = [shape for shape in shapes if rng.random() < 0.8]
    mixes.activate(active)
    for time_s in (rng.uniform(0.5, 60.0), rng.uniform(0.5, 60.0), 1e300):
        # One that has been replayed, and took a little longer.
        slow = rng.choice(active)[:1] * rng.randint(1, len(shapes)) if active else shapes[0]
        replayed = {slow: {rng.randint(1, micro_batches): rng.choice([0.9, 1.1]) * time_s}}
        too_many = [count for count, own_s in replayed[slow].items() if own_s > time_s]

        @cache
        def alone(shape: tuple[int, ...]) -> int:
            """The most micro-batches of a pipeline."""
            enough = min([micro_batches, *(count - 1 for count in too_many if shape == slow)])  # noqa: B023
            return max(each.most(shape, time_s, enough) for each in bounds)  # noqa: B023

        @cache
        def most(left: int, items: int) -> float:
            if not items:
                return 0
            rest = (alone(s) + most(left - len(s), items - 1) for s in active if len(s) <= left and alone(s))
            return max(rest, default=-math.inf)

        best = max([0.0, *(most(workers, number) for number in range(fewest, min(fewest + more, workers) + 1))])
        assert mixes.promise(time_s) >= best
        found = mixes.at(time_s, replayed)
        if best < micro_batches:
            assert best <= found < micro_batches
            continue
        shares = mixes.shares()
        assert found == best == sum(count * number for _, count, number in shares)
        assert all(count == alone(shape) for shape, count, _ in shares)
        assert sum(len(shape) * number for shape, _, number in shares) <= workers
        assert fewest <= sum(number for _, _, number in shares) <= fewest + more


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.booleans(), fewest=st.integers(1, 3))
def test_the_least_time_is_between_one_that_does_and_one_that_does_not(seed: int, split: bool, fewest: int) -> None:
    rng = random.Random(seed)
    workers, micro_batches, precision = rng.randint(3, 7), rng.randint(3, 20), 1e-3
    costs = instance(
        rng, workers=workers, layers=rng.randint(1, 6), micro_batches=micro_batches, kinds=1, memory=rng.random() < 0.5
    )
    shapes, _ = shapes_of((workers,), len(costs.workload.layers))
    bounds = both(costs, SyncCost(), split=split)
    mixes, fresh = (DepthMixes(bounds, shapes, workers, (fewest, workers)) for _ in range(2))
    high = rng.uniform(50.0, 5000.0)
    slow = rng.choice(shapes)
    replayed = {slow: {rng.randint(1, micro_batches): rng.uniform(0.1, 1.1) * high}}
    if fresh.at(high, replayed) < micro_batches:
        return
    low = mixes.narrowed(0.0, high, replayed, precision=precision)
    shares = mixes.shares()
    assert sum(count * number for _, count, number in shares) >= micro_batches
    assert fewest <= sum(number for _, _, number in shares)
    assert fresh.at(low / (1 - 2 * precision), replayed) >= micro_batches
    assert low == 0 or fresh.at(low, replayed) < micro_batches


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_largest_stage_is_the_least_of_all_cuts(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 7)
    costs = instance(rng, workers=1, layers=layers, micro_batches=1, kinds=1, memory=False)
    work_s = [layer.forward_s + layer.least_backward_s for layer in costs.workload.layers]
    largest_s = _largest_stage_s(work_s)
    assert largest_s[0] == 0
    for depth in range(1, layers + 1):
        least_s = min(
            max(sum(work_s[start:stop]) for start, stop in zip((0, *stops), stops, strict=False))
            for stops in cuts(layers, depth)
        )
        assert largest_s[depth] == pytest.approx(least_s)
