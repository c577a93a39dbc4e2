"""Local search from pipelines that are placed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.schedule import CostModel
from chameleon_ft.search.pipelines import PipelineScheduler, PipelineSearch, PipelineSpec
from chameleon_ft.search.placement import GradientSync, PlacedPipelines
from chameleon_ft.search.polish import Polish
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerPool
from tests.examples import examples
from tests.search.instances import instance, with_gradients
from tests.search.oracle import cuts

OPTIONS = SearchOptions()


class Problem:
    def __init__(self, seed: int, *, memory: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        costs = instance(rng, workers=8, layers=rng.randint(4, 8), micro_batches=8, kinds=1, memory=memory)
        self.costs: CostModel = with_gradients(costs, rng)
        pool = WorkerPool.of(costs.cluster)
        scheduler = PipelineScheduler(
            Stages(self.costs, pool.classes, split_backward=rng.random() < 0.7), pool, OPTIONS
        )
        self.search = PipelineSearch(scheduler, OPTIONS)
        self.sync = GradientSync(self.costs)
        self.polish = Polish([self.search], self.sync, self.costs.cluster, OPTIONS)

    def pipelines(self, cut_points: tuple[int, ...], shares: list[int]) -> PlacedPipelines | None:
        depth = len(cut_points)
        found = []
        for place, share in enumerate(shares):
            workers = tuple(range(place * depth, (place + 1) * depth))
            found_options = self.search.estimates.chosen((0,) * depth, cut_points, share)
            if not found_options:
                return None
            _, options = found_options[-1]
            spec = PipelineSpec((0,) * depth, cut_points, options, share)
            timed = self.search.scheduler.scheduled(spec, effort=OPTIONS.look_effort, workers=workers)
            if timed is None:
                return None
            found.append((timed, workers))
        return tuple(found)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), memory=st.booleans())
def test_polished_pipelines_are_no_slower_and_fit(seed: int, memory: bool) -> None:
    problem = Problem(seed, memory=memory)
    depth = problem.rng.randint(2, 4)
    cut_points = problem.rng.choice(list(cuts(len(problem.costs.workload.layers), depth)))
    before = problem.pipelines(cut_points, [5, 3])
    if before is None:
        return
    after = problem.polish.improved(before)
    assert problem.sync.step_s(after) <= problem.sync.step_s(before)
    assert [workers for _, workers in after] == [workers for _, workers in before]
    assert sum(timed.spec.micro_batches for timed, _ in after) == 8
    assert all(problem.search.scheduler.limits(timed.spec) is not None for timed, _ in after)
    capacity = problem.costs.cluster.workers[0].memory_bytes
    if capacity is not None:
        assert all(problem.search.scheduler.peak_bytes(timed) <= capacity for timed, _ in after)


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_moves_from_a_slow_stage_to_another(seed: int) -> None:
    problem = Problem(seed)
    of_two = {}
    for cut_points in cuts(len(problem.costs.workload.layers), 2):
        pipelines = problem.pipelines(cut_points, [8])
        assert pipelines is not None
        of_two[cut_points] = pipelines[0][0].program_s
    start = problem.pipelines(max(of_two, key=of_two.__getitem__), [8])
    assert start is not None
    found = problem.polish.improved(start)[0][0]
    assert found.program_s < max(of_two.values())
    assert found.program_s <= min(of_two.values()) * 1.2


def test_the_best_program_of_each_pipeline_is_that_of_best_program() -> None:
    problem = Problem(3)
    pipelines = problem.pipelines((2, len(problem.costs.workload.layers)), [5, 3])
    assert pipelines is not None
    best = problem.polish.with_best_programs(pipelines)
    assert max(timed.program_s for timed, _ in best) <= max(timed.program_s for timed, _ in pipelines)
