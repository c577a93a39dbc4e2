"""Which worker takes which stage, and what gradient sync makes of it."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.step import estimate_sync
from chameleon_ft.plan import LayerRange, Placement, Plan, Route
from chameleon_ft.plan.layouts import pipeline_hops
from chameleon_ft.schedule import CostModel, Operation, Program, replay
from chameleon_ft.schedule.program import operations_from, records_by_code
from chameleon_ft.search.pipelines import PipelineScheduler, PipelineSpec
from chameleon_ft.search.placement import GradientSync, _by_pipeline, _by_stage, _orders_of_hosts
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerPool
from chameleon_ft.workload import TiedParameters
from tests.examples import examples
from tests.search.instances import instance
from tests.search.oracle import cuts

NEAR, FAR = Link(0.0, 1000.0), Link(0.1, 10.0)


def hosts(sizes: list[int]) -> Cluster:
    names = [f"host {number}" for number, size in enumerate(sizes) for _ in range(size)]
    return Cluster(tuple(Worker(worker, name) for worker, name in enumerate(names)), NEAR, FAR)


def crossings(pipelines: list[tuple[int, ...]], cluster: Cluster) -> int:
    host = {worker.id: worker.host for worker in cluster.workers}
    return sum(host[a] != host[b] for workers in pipelines for a, b in pairwise(workers))


@pytest.mark.parametrize(
    ("sizes", "depths", "expected"),
    [([4, 4], [4, 4], 0), ([8, 8], [3, 4, 4, 5], 0), ([3, 4], [4, 3], 0), ([3, 3], [2, 2, 2], 1), ([4, 4], [8], 1)],
)
def test_pipelines_stay_inside_hosts_where_they_fit(sizes: list[int], depths: list[int], expected: int) -> None:
    cluster = hosts(sizes)
    placed = _by_pipeline([(0,) * depth for depth in depths], WorkerPool.of(cluster), cluster)
    assert list(map(len, placed)) == depths
    assert len({worker for workers in placed for worker in workers}) == sum(depths)
    assert crossings(placed, cluster) == expected


def test_equal_stages_share_a_host() -> None:
    cluster = hosts([4, 4])
    (placed,) = _by_stage([(0, 0)] * 4, [(1, 2)] * 4, [WorkerPool.of(cluster).members])
    assert {cluster.worker(workers[0]).host for workers in placed} == {"host 0"}
    assert {cluster.worker(workers[1]).host for workers in placed} == {"host 1"}


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [([2, 2, 2], 4, [[0]]), ([1, 2, 2], 4, [[0], [1], [2]]), ([1, 2, 2, 2], 2, [[0], [2]])],
)
def test_hosts_with_fewer_workers_come_first_or_later(sizes: list[int], most: int, expected: list[list[int]]) -> None:
    cluster = hosts(sizes)
    names = [f"host {number}" for number in range(len(sizes))]
    found = _orders_of_hosts(WorkerPool.of(cluster), cluster, most=most)
    assert all(sorted(worker for own in order for worker in own) == list(range(sum(sizes))) for order in found)
    for (order,), (first,) in zip(found, expected, strict=True):
        met = list(dict.fromkeys(cluster.worker(worker).host for worker in order))
        assert met == [*names[first:], *names[:first]], "each host once, in a circle"


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.booleans(), tied=st.booleans())
def test_gradient_sync_from_one_of_each_class_is_that_of_all(seed: int, split: bool, tied: bool) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 5)
    depths = [rng.randint(1, layers) for _ in range(rng.randint(1, 5))]
    costs = instance(rng, workers=sum(depths), layers=layers, micro_batches=1, kinds=1, memory=False)
    workload = dataclasses.replace(
        costs.workload,
        layers=tuple(
            dataclasses.replace(
                layer, gradient_bytes=rng.choice([0, rng.randint(9, 90)]) if layer.name[-1] in "13" else 9
            )
            for layer in costs.workload.layers
        ),
        tied=(TiedParameters((0, layers - 1), 9),) if tied and layers % 2 and layers > 1 else (),
    )
    own = tuple(Worker(worker.id, f"host {worker.id % 3}") for worker in costs.cluster.workers)
    costs = CostModel(workload, Cluster(own, NEAR, FAR))
    pool = WorkerPool.of(costs.cluster)
    scheduler = PipelineScheduler(Stages(costs, pool.classes, split_backward=split), pool, SearchOptions())
    classes = {depth: (rng.choice(list(cuts(layers, depth))), rng.randint(1, 4)) for depth in set(depths)}
    placed = []
    for depth, workers in zip(
        depths, _by_pipeline([(0,) * depth for depth in depths], pool, costs.cluster), strict=True
    ):
        cut_points, share = classes[depth]
        options = tuple(own[0] for own in scheduler.stages.options_of((0,) * depth, cut_points))
        timed = scheduler.scheduled(
            PipelineSpec((0,) * depth, cut_points, options, share), effort=10_000, workers=workers
        )
        assert timed is not None
        placed.append((timed, workers))
    held: dict[int, tuple[LayerRange, ...]] = {}
    operations: dict[int, tuple[Operation, ...]] = {}
    first = 0
    for timed, workers in placed:
        hops = pipeline_hops(workers, timed.cut_points)
        routes = [Route(number, hops) for number in range(timed.spec.micro_batches)]
        alone = Plan(Placement(layers, {hop.worker: (hop.layers,) for hop in hops}), tuple(routes), split)
        by_code = records_by_code(alone, routes)
        programs = [operations_from(by_code[order]) for order in timed.schedule.orders]
        for hop, program in zip(hops, programs, strict=True):
            held[hop.worker] = (hop.layers,)
            operations[hop.worker] = tuple(
                dataclasses.replace(operation, micro_batch=first + operation.micro_batch) for operation in program
            )
        first += timed.spec.micro_batches
    whole = estimate_sync(Placement(layers, held), replay(Program(operations), costs), costs)
    assert GradientSync(costs).step_s(tuple(placed)) == pytest.approx(max(whole.end_s, whole.program_s))
