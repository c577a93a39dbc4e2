"""Lower bounds of gradient sync, against plans on hosts, and all plans on small ones."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.plan import Placement
from chameleon_ft.plan.layouts import pipeline_hops
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import find_plan
from chameleon_ft.search.bounds import PipelineBounds, SyncLowerBound
from chameleon_ft.search.pipelines import PipelineScheduler, PipelineSpec, TimedPipeline
from chameleon_ft.search.placement import GradientSync
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerPool
from chameleon_ft.sync import gradient_rounds, segment_bytes
from chameleon_ft.workload import LayerCost, Workload
from tests.cost.programs import reduction_s
from tests.examples import examples
from tests.search.instances import instance, with_gradients
from tests.search.oracle import cuts

EFFORT = 500
seeds = st.integers(0, 2**32 - 1)


def on_hosts(rng: random.Random, *, workers: int, layers: int, micro_batches: int) -> CostModel:
    """Two hosts, mostly with slow links between them."""
    costs = instance(rng, workers=workers, layers=layers, micro_batches=micro_batches, kinds=1, memory=False)
    costs = with_gradients(costs, rng)
    own = tuple(Worker(worker.id, f"host {worker.id * 2 // workers}") for worker in costs.cluster.workers)
    near, far = Link(rng.choice([0.0, 0.1]), 1000.0), Link(rng.choice([0.0, 0.2]), rng.choice([5.0, 40.0, 1000.0]))
    return CostModel(costs.workload, Cluster(own, near, far))


def scheduler_of(costs: CostModel, *, split: bool) -> PipelineScheduler:
    pool = WorkerPool.of(costs.cluster)
    return PipelineScheduler(Stages(costs, pool.classes, split_backward=split), pool, SearchOptions())


def placed(
    scheduler: PipelineScheduler, workers: tuple[int, ...], cut_points: tuple[int, ...], micro_batches: int
) -> tuple[TimedPipeline, tuple[int, ...]]:
    shape = (0,) * len(workers)
    options = tuple(own[0] for own in scheduler.stages.options_of(shape, cut_points))
    timed = scheduler.scheduled(PipelineSpec(shape, cut_points, options, micro_batches), effort=EFFORT, workers=workers)
    assert timed is not None
    return timed, workers


def split_among(rng: random.Random, workers: list[int], depths: list[int]) -> list[tuple[int, ...]]:
    if rng.random() < 0.5:
        rng.shuffle(workers)
    starts = [sum(depths[:place]) for place in range(len(depths))]
    return [tuple(workers[start : start + depth]) for start, depth in zip(starts, depths, strict=True)]


@settings(max_examples=examples(150), deadline=None)
@given(seed=seeds, split=st.booleans())
def test_no_worker_of_any_plan_reduces_its_gradients_in_less(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    layers, number = rng.randint(1, 6), rng.randint(2, 3)
    depths = [rng.randint(1, layers) for _ in range(number)]
    shares = [rng.randint(1, 3) for _ in depths]
    costs = on_hosts(rng, workers=sum(depths), layers=layers, micro_batches=sum(shares))
    scheduler = scheduler_of(costs, split=split)
    workers = split_among(rng, list(range(sum(depths))), depths)
    cut_points = [rng.choice(list(cuts(layers, depth))) for depth in depths]
    pipelines = [placed(scheduler, *each) for each in zip(workers, cut_points, shares, strict=True)]
    sync = SyncLowerBound(costs, GradientSync(costs).step_s(tuple(pipelines))).of(number)
    least = PipelineBounds(scheduler.stages, sync)
    spent_s = dict.fromkeys(range(sum(depths)), 0.0)
    held = {hop.worker: (hop.layers,) for timed, own in pipelines for hop in pipeline_hops(own, timed.cut_points)}
    for segments in gradient_rounds(Placement(layers, held), costs.workload.tied_layers).rounds:
        for segment in segments:
            if segment_bytes(segment, costs.workload):
                for worker in segment.holders:
                    spent_s[worker] += reduction_s(segment, costs)
    for own, ends in zip(workers, cut_points, strict=True):
        for worker, (start, stop) in zip(own, pairwise((0, *ends)), strict=True):
            assert least.sync_s[start, stop] <= spent_s[worker] * (1 + 1e-9)


@settings(max_examples=examples(200), deadline=None)
@given(seed=seeds)
def test_no_layers_that_a_host_has_time_for_exceed_the_bound_on_their_gradients(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 8)
    costs = on_hosts(rng, workers=6, layers=layers, micro_batches=rng.randint(1, 4))
    max_s = rng.uniform(0.1, 20.0)
    sync = SyncLowerBound(costs, max_s).of(3)
    budget_s = 3 * max_s / costs.workload.micro_batches
    largest = 0
    for count in range(layers + 1):
        for some in combinations(costs.workload.layers, count):
            if sum(layer.forward_s + layer.min_backward_s for layer in some) <= budget_s:
                largest = max(largest, sum(layer.gradient_bytes for layer in some))
    assert sync.inside_bytes >= largest * (1 - 1e-9)


def equal_layers(layers: int, micro_batches: int, sizes: list[int]) -> CostModel:
    layer = LayerCost("layer", 1.0, 1.0, 1.0, gradient_bytes=10)
    names = [f"host {number}" for number, size in enumerate(sizes) for _ in range(size)]
    cluster = Cluster(tuple(Worker(worker, name) for worker, name in enumerate(names)), Link(0, 1000), Link(0, 10))
    return CostModel(Workload((layer,) * layers, micro_batches, 1), cluster)


def test_a_stage_with_more_layers_than_a_host_has_time_for_reduces_the_rest_between_hosts() -> None:
    costs = equal_layers(8, 12, [4, 4])
    # Of layers that take 3 s for each of 12 micro-batches, four workers compute three in 27 s, and not four in 35 s.
    for max_s in (27.0, 35.0):
        sync = SyncLowerBound(costs, max_s).of(4)
        assert sync.inside_bytes == pytest.approx(30)
        bounds = PipelineBounds(scheduler_of(costs, split=True).stages, sync)
        near_s, far_s = 1.5 * 10 / 1000, 1.5 * 10 / 10
        assert [float(bounds.sync_s[1, 1 + count]) for count in range(1, 6)] == pytest.approx(
            [near_s, 2 * near_s, 3 * near_s, 3 * near_s + far_s, 3 * near_s + 2 * far_s]
        )
    assert SyncLowerBound(costs, math.inf).of(4).inside_bytes == 80
    assert SyncLowerBound(costs, 27.0).of(5).per_byte_s == pytest.approx(1.6 / 10), "five are not on one host"


def ways(workers: int, layers: int, micro_batches: int) -> list[list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """All pairs of pipelines on some of the workers: workers, cuts and shares."""
    found = []
    for first, second in product(range(1, layers + 1), repeat=2):
        if first + second <= workers:
            for own in permutations(range(workers), first + second):
                for cut_points, others in product(cuts(layers, first), cuts(layers, second)):
                    for share in range(1, micro_batches):
                        found.append([(own[:first], cut_points, share), (own[first:], others, micro_batches - share)])
    return found


@settings(max_examples=examples(12), deadline=None)
@given(seed=seeds)
def test_no_two_pipelines_on_any_hosts_beat_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    costs = on_hosts(rng, workers=4, layers=3, micro_batches=rng.randint(2, 4))
    # Little is left but to have two pipelines: one worker alone takes longest of all.
    layers = tuple(
        dataclasses.replace(layer, gradient_bytes=layer.gradient_bytes + 5) for layer in costs.workload.layers
    )
    costs = CostModel(dataclasses.replace(costs.workload, layers=layers, tied=()), costs.cluster)
    min_s = math.inf
    for split in (False, True):
        scheduler, sync = scheduler_of(costs, split=split), GradientSync(costs)
        for pipelines in ways(4, 3, costs.workload.micro_batches):
            min_s = min(min_s, sync.step_s(tuple(placed(scheduler, *each) for each in pipelines)))
    assert find_plan(costs).bound_s <= min_s * (1 + 1e-9)


def test_the_bound_knows_that_rings_inside_a_host_leave_room_for_few_layers() -> None:
    costs = equal_layers(4, 6, [2, 2])
    found = find_plan(costs)
    scheduler, sync = scheduler_of(costs, split=True), GradientSync(costs)
    min_s = min(sync.step_s(tuple(placed(scheduler, *each) for each in pipelines)) for pipelines in ways(4, 4, 6))
    assert found.bound_s <= min_s * (1 + 1e-9)
    assert found.best.step_s <= min_s * (1 + 1e-9)


def test_layers_that_take_no_time_may_be_inside_a_host_as_well() -> None:
    costs = equal_layers(4, 6, [2, 2])
    first = LayerCost("first", 0.0, 0.0, 0.0, gradient_bytes=7)
    costs = CostModel(dataclasses.replace(costs.workload, layers=(first, *costs.workload.layers[1:])), costs.cluster)
    sync = SyncLowerBound(costs, 9.0).of(2)
    assert sync.inside_bytes == pytest.approx(10), "one layer takes 9 of the 9 s that two workers have for half of it"
    assert float(PipelineBounds(scheduler_of(costs, split=True).stages, sync).sync_s[0, 2]) == pytest.approx(17 / 1000)


def test_pipelines_are_not_confused_with_deleted_ones() -> None:
    costs = on_hosts(random.Random(0), workers=2, layers=2, micro_batches=3)
    scheduler, sync = scheduler_of(costs, split=False), GradientSync(costs)
    (one, workers), (more, _) = placed(scheduler, (0,), (2,), 1), placed(scheduler, (0,), (2,), 3)
    replayed: list[float] = []
    steps_s: list[float] = []
    # A copy that is gone leaves its address to the next one.
    for timed in (one, more) * 20:
        copied = dataclasses.replace(timed)
        steps_s.append(sync.step_s(((copied, workers),)))
        replayed.append(scheduler.replayed(copied, workers).program_s)
        del copied
    assert steps_s == pytest.approx([one.program_s, more.program_s] * 20)
    assert replayed == pytest.approx([one.program_s, more.program_s] * 20)


def test_few_deep_pipelines_are_compared_before_the_many_shallow_ones() -> None:
    """Two pipelines are best here, and of three the best takes 41.06 s."""
    rng = random.Random(38)
    workers, layers, micro_batches = rng.randint(4, 9), rng.randint(3, 7), rng.randint(2, 10)
    costs = instance(
        rng,
        workers=workers,
        layers=layers,
        micro_batches=micro_batches,
        kinds=rng.choice([1, 1, 2]),
        memory=False,
    )
    link = Link(0.0, 515 / 90)
    costs = CostModel(with_gradients(costs, rng).workload, Cluster(costs.cluster.workers, link, link))
    found = find_plan(costs)
    assert found.best.step_s == pytest.approx(39.2032, rel=1e-4)
    assert found.best.plan.placement.fewest_holders == 2
