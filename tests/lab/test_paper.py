"""The paper's search against a plain enumeration of all that it is to look at, and its plans against ours."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.lab.paper import paper_plan, pipeline_step_s
from chameleon_ft.lab.planned_layouts import BaselinePlan
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.workload import LayerCost, Workload
from tests.cost.programs import stage_bytes
from tests.examples import examples
from tests.lab.one_f_one_b import fits
from tests.search.instances import instance

FREE = Link(0.0, math.inf)
seeds = st.integers(0, 2**32 - 1)


def small(seed: int, *, workers: int, layers: int, micro_batches: int, kinds: int = 1) -> CostModel:
    rng = random.Random(seed)
    return instance(
        rng,
        workers=rng.randint(1, workers),
        layers=rng.randint(1, layers),
        micro_batches=rng.randint(1, micro_batches),
        kinds=kinds,
        memory=rng.random() < 0.6,
    )


def partitions(number: int, most: int) -> Iterator[list[int]]:
    """The ways to write `number` as a sum of falling numbers up to `most`."""
    if not number:
        yield []
    for first in range(min(number, most), 0, -1):
        for rest in partitions(number - first, first):
            yield [first, *rest]


def placements(remainder: int, places: int) -> Iterator[list[int]]:
    """The ways to put so many equal things into so many places."""
    if places == 1:
        yield [remainder]
        return
    for here in range(remainder + 1):
        for rest in placements(remainder - here, places - 1):
            yield [here, *rest]


def shares(workers: int, layers: int, micro_batches: int) -> Iterator[list[tuple[int, int]]]:
    """All pipelines that the paper looks at, by depth and micro-batches."""
    for depths in partitions(workers, min(workers, layers)):
        floors = [micro_batches * depth // workers for depth in depths]
        for extra in placements(micro_batches - sum(floors), len(depths)):
            mix = [(depth, floor + more) for depth, floor, more in zip(depths, floors, extra, strict=True)]
            if all(share for _, share in mix):
                yield mix


def pipeline_least_s(costs: CostModel, depth: int, share: int) -> float:
    """By the paper's estimate, over all placements of the layers that do not go into equal stages."""
    each, remainder = divmod(len(costs.workload.layers), depth)
    times = [math.inf]
    for extra in placements(remainder, depth):
        cut_points = [sum(extra[: stage + 1]) + each * (stage + 1) for stage in range(depth)]
        stages = list(pairwise([0, *cut_points]))
        reported = all(reported_fits(costs, index, *stage, depth) for index, stage in enumerate(stages))
        if reported and fits(costs, tuple(cut_points), share):
            layers = [costs.workload.layers[start:stop] for start, stop in stages]
            overhead_s = costs.workload.operation_overhead_s
            times.append(
                pipeline_step_s(
                    forward_s=[overhead_s + sum(layer.forward_s for layer in own) for own in layers],
                    backward_s=[overhead_s + sum(layer.backward_s for layer in own) for own in layers],
                    micro_batches=share,
                )
            )
    return min(times)


def reported_fits(costs: CostModel, stage: int, start: int, stop: int, depth: int) -> bool:
    capacity = costs.cluster.workers[0].memory_bytes
    if capacity is None:
        return True
    layers = costs.workload.layers[start:stop]
    reported = sum(
        stage_bytes(
            stage=stage,
            stages=depth,
            layers=1,
            state_bytes=layer.param_bytes + layer.gradient_bytes + layer.optimizer_bytes,
            activation_bytes=layer.activation_bytes,
        )
        for layer in layers
    )
    return reported <= capacity


def pipelines_of(result: BaselinePlan) -> dict[tuple[int, ...], int]:
    """Micro-batches by the workers that they pass."""
    return Counter(tuple(hop.worker for hop in route.hops) for route in result.found.plan.routes)


@settings(max_examples=examples(100), deadline=None)
@given(seed=seeds)
def test_it_chooses_as_exhaustive_search_does(seed: int) -> None:
    costs = small(seed, workers=7, layers=6, micro_batches=9)
    known: dict[tuple[int, int], float] = {}

    def time_s(depth: int, share: int) -> float:
        if (depth, share) not in known:
            known[depth, share] = pipeline_least_s(costs, depth, share)
        return known[depth, share]

    workload = costs.workload
    mixes = shares(len(costs.cluster.workers), len(workload.layers), workload.micro_batches)
    min_s = min((max(time_s(*each) for each in mix) for mix in mixes), default=math.inf)
    chosen = paper_plan(costs)
    if min_s == math.inf:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.estimate_s == pytest.approx(min_s, rel=1e-9)
    mix = [(len(workers), share) for workers, share in pipelines_of(chosen).items()]
    assert max(time_s(*each) for each in mix) == pytest.approx(min_s, rel=1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(seed=seeds, kinds=st.integers(2, 3))
def test_the_predicted_step_is_not_below_the_bound(seed: int, kinds: int) -> None:
    rng = random.Random(seed)
    costs = instance(rng, workers=rng.randint(2, 6), layers=4, micro_batches=6, kinds=kinds, memory=False)
    chosen = paper_plan(costs)
    assert chosen is not None
    plan = chosen.found.plan
    bound_s = estimate_step(plan, best_program(plan, costs).program, costs).bound_s
    assert chosen.found.step_s >= bound_s * (1 - 1e-9)


@pytest.mark.parametrize(("capacity", "found"), [(24, False), (25, True)])
def test_the_reported_memory_decides_too(capacity: int, found: bool) -> None:
    # It counts two micro-batches in flight at the first of two stages, even if there is only one to do.
    layer = LayerCost("layer", 1.0, 1.0, 1.0, activation_bytes=10, gradient_bytes=5)
    workers = tuple(Worker(number, "host", memory_bytes=capacity) for number in range(2))
    chosen = paper_plan(CostModel(Workload((layer, layer), 1, 1), Cluster(workers, FREE, FREE)))
    assert (chosen is not None) is found
