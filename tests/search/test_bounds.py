"""Bounds on pipelines, against programs that fit the memory of their workers."""

from __future__ import annotations

import math
import random
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cost.memory import program_memory
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import InFlightLimit, list_schedule, replay
from chameleon_ft.search.bounds import PipelineBounds, SyncCost
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerClass
from tests.examples import examples
from tests.search.instances import instance
from tests.search.oracle import cuts

seeds = st.integers(0, 2**32 - 1)


def _some_of(rng: random.Random, layers: LayerRange) -> RecomputedLayers:
    """Some of the layers of a stage selectively, or some in full and all others selectively or not at all."""
    stop = rng.randint(layers.start + 1, layers.stop)
    if rng.random() < 2 / 3:
        return RecomputedLayers(layers.start, stop, rng.choice([0, stop - layers.start]))
    return RecomputedLayers(layers.start, layers.stop, layers.stop - stop)


@settings(max_examples=examples(400), deadline=None)
@given(seed=seeds, split=st.booleans(), forward_first=st.booleans(), few=st.booleans())
def test_no_program_that_fits_is_below_the_bound(seed: int, split: bool, forward_first: bool, few: bool) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 5)
    depth = rng.randint(1, layers)
    costs = instance(rng, workers=depth, layers=layers, micro_batches=rng.randint(1, 12), kinds=1, memory=False)
    cut_points = rng.choice(list(cuts(layers, depth)))
    hops = tuple(
        Hop(at, LayerRange(*pair)) for at, pair in enumerate(zip((0, *cut_points[:-1]), cut_points, strict=True))
    )
    recompute = {hop.worker: _some_of(rng, hop.layers) for hop in hops if rng.random() < 0.5}
    count = costs.workload.micro_batches
    plan = Plan(
        Placement(layers, {hop.worker: (hop.layers,) for hop in hops}),
        tuple(Route(number, hops) for number in range(count)),
        split,
        FrozenMap(recompute),
    )
    limits = {}
    for hop in hops:
        in_flight = rng.randint(1, 2) if few else rng.randint(1, 2 * depth)
        kept = in_flight + rng.randint(0, 3)
        limits[hop.worker] = InFlightLimit(in_flight, kept, rng.choice([None, 1, 2]))
    program = list_schedule(plan, costs, limits, forward_first=forward_first)
    # A worker has exactly the memory that it needs.
    memory = program_memory(program, plan.placement, costs.workload)
    classes = [WorkerClass(1.0, memory[hop.worker].peak_bytes) for hop in hops]
    stages = Stages(costs, classes, split_backward=split)
    shape = tuple(range(depth))
    bounds = PipelineBounds(stages, SyncCost())
    step_s = replay(program, costs).step_s
    assert _over_options_s(bounds, shape, cut_points, count) <= step_s * (1 + 1e-9)
    assert bounds.min_s(shape, count) <= step_s * (1 + 1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(seed=seeds, split=st.booleans())
def test_the_bound_of_the_best_cut_is_the_least_of_all_cuts(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    layers, count = rng.randint(1, 6), rng.randint(1, 8)
    depth = rng.randint(1, layers)
    costs = instance(rng, workers=depth, layers=layers, micro_batches=count, kinds=1, memory=True)
    capacity = costs.cluster.workers[0].memory_bytes
    stages = Stages(costs, [WorkerClass(1.0, capacity)], split_backward=split)
    bounds = PipelineBounds(stages, SyncCost())
    shape = (0,) * depth
    min_s = min(_over_options_s(bounds, shape, cut_points, count) for cut_points in cuts(layers, depth))
    # The best cut of the stages after one need not be the same for all three times that are known of them.
    assert bounds.min_s(shape, count) <= min_s * (1 + 1e-9)
    assert bounds.most(shape, bounds.min_s(shape, count), count, quick=False) in (0, count)


def _over_options_s(bounds: PipelineBounds, shape: tuple[int, ...], cut_points: tuple[int, ...], count: int) -> float:
    every = product(*bounds.stages.options_of(shape, cut_points))
    return min((bounds.bound_s(shape, cut_points, count, options) for options in every), default=math.inf)
