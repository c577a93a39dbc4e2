"""The least step time over all pipelines side by side, by trying everything: every order of classes of workers in a
pipeline, every cut, every share, every number of recomputed layers of each stage, fused and split backward, every
choice of workers.

Shares with the search only what times a given pipeline (`pipeline_schedule`), and how much a stage may keep under a
given recomputation (`Stages.limits`), which has tests of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, pairwise, permutations, product

from chameleon_ft.cluster import Worker
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program
from chameleon_ft.search.pipelines import PipelineScheduler, PipelineSpec, TimedPipeline
from chameleon_ft.search.placement import GradientSync
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerClass, WorkerPool

Kind = tuple[float, int | None]


def kind_of(worker: Worker) -> Kind:
    return worker.speed, worker.memory_bytes


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """The cut points of all contiguous cuts."""
    for inner in combinations(range(1, layers), stages - 1):
        yield (*inner, layers)


@dataclass(frozen=True)
class Exhaustive:
    """Everything that can be done with the workers of `costs`."""

    costs: CostModel

    def min_s(self) -> float:
        """Seconds of the fastest plan, each pipeline with fused or with split backward; infinite if none fits."""
        workload = self.costs.workload
        by_kind: dict[Kind, list[int]] = {}
        for worker in self.costs.cluster.workers:
            by_kind.setdefault(kind_of(worker), []).append(worker.id)
        kinds = sorted(by_kind, key=str)
        counts = tuple(len(by_kind[kind]) for kind in kinds)
        deepest = min(sum(counts), len(workload.layers))
        times: dict[tuple[tuple[int, ...], int], float] = {}
        for workers in self._pipelines([by_kind[kind] for kind in kinds], deepest):
            size = tuple(sum(worker in by_kind[kind] for worker in workers) for kind in kinds)
            for cut_points in cuts(len(workload.layers), len(workers)):
                for share in range(1, workload.micro_batches + 1):
                    every = (self.pipelines_s(workers, cut_points, share, split) for split in (False, True))
                    time_s = min(chain(*every), default=math.inf)
                    times[size, share] = min(time_s, times.get((size, share), math.inf))
        sizes = sorted({size for size, _ in times})

        @cache
        def least(left: tuple[int, ...], micro_batches: int) -> float:
            if not micro_batches:
                return 0.0
            best = math.inf
            for size in sizes:
                rest = tuple(have - taken for have, taken in zip(left, size, strict=True))
                if min(rest) < 0:
                    continue
                for share in range(1, micro_batches + 1):
                    own_s = times[size, share]
                    if own_s < best:
                        best = min(best, max(own_s, least(rest, micro_batches - share)))
            return best

        return least(counts, workload.micro_batches)

    def pipelines_s(
        self, workers: Sequence[int], cut_points: tuple[int, ...], share: int, split: bool
    ) -> Iterator[float]:
        """Seconds of one pipeline with every recomputation that fits."""
        hops = tuple(Hop(w, LayerRange(*cut)) for w, cut in zip(workers, pairwise((0, *cut_points)), strict=True))
        classes = [WorkerClass(*kind_of(self.costs.cluster.worker(worker))) for worker in workers]
        stages = Stages(self.costs, classes, split_backward=split)
        shape = tuple(range(len(workers)))
        for options in product(*stages.options_of(shape, cut_points)):
            limits = stages.limits(shape, cut_points, options, share)
            if limits is None:
                continue
            recomputed = stages.recomputed_layers(cut_points, options)
            recompute = {worker: own for worker, own in zip(workers, recomputed, strict=True) if own}
            plan = Plan(
                Placement(cut_points[-1], {hop.worker: (hop.layers,) for hop in hops}),
                tuple(Route(number, hops) for number in range(share)),
                split,
                FrozenMap(recompute),
            )
            in_flight_limits = dict(zip(workers, map(InFlightLimit, *limits.tolist()), strict=True))
            yield best_program(plan, self.costs, in_flight_limits=in_flight_limits).step_s

    @staticmethod
    def _pipelines(members: Sequence[Sequence[int]], deepest: int) -> Iterator[tuple[int, ...]]:
        """For every order of kinds, some workers of these kinds."""
        kinds = [number for number, own in enumerate(members) for _ in own]
        for depth in range(1, deepest + 1):
            for order in sorted(set(permutations(kinds, depth))) if len(members) > 1 else [(0,) * depth]:
                used: Counter[int] = Counter()
                workers: list[int] = []
                for kind in order:
                    workers.append(members[kind][used[kind]])
                    used[kind] += 1
                yield tuple(workers)


def min_placed_s(costs: CostModel) -> float:
    """Seconds of the fastest plan of all pipelines on all workers, where gradient sync and links count too.

    Shares with the search what times a pipeline on given workers, and what gradient sync adds to given pipelines.
    """
    pool, options, sync = WorkerPool.of(costs.cluster), SearchOptions.of(None), GradientSync(costs)
    schedulers = [
        PipelineScheduler(Stages(costs, pool.classes, split_backward=split), pool, options) for split in (True, False)
    ]
    class_of, layers = pool.class_of(), len(costs.workload.layers)

    @cache
    def timed(workers: tuple[int, ...], share: int) -> list[tuple[TimedPipeline, tuple[int, ...]]]:
        shape = tuple(class_of[worker] for worker in workers)
        found = [
            scheduler.scheduled(
                PipelineSpec(shape, cut_points, chosen, share), effort=options.polish_effort, workers=workers
            )
            for cut_points in cuts(layers, len(workers))
            for scheduler in schedulers
            for chosen in product(*scheduler.stages.options_of(shape, cut_points))
        ]
        return [(each, workers) for each in found if each is not None]

    best_s = math.inf
    for pipelines in _disjoint(tuple(worker.id for worker in costs.cluster.workers), layers):
        for shares in _shares(costs.workload.micro_batches, len(pipelines)):
            every = [
                [own for own in timed(workers, share) if own[0].program_s < best_s]
                for workers, share in zip(pipelines, shares, strict=True)
            ]
            best_s = min(chain([best_s], map(sync.step_s, product(*every))))
    return best_s


def _disjoint(workers: tuple[int, ...], deepest: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Sets of pipelines, each of some workers in some order; workers may be idle."""
    if not workers:
        yield ()
        return
    first, rest = workers[0], workers[1:]
    yield from _disjoint(rest, deepest)
    for count in range(min(deepest, len(workers))):
        for others in combinations(rest, count):
            left = tuple(worker for worker in rest if worker not in others)
            for own in permutations((first, *others)):
                yield from ((own, *more) for more in _disjoint(left, deepest))


def _shares(micro_batches: int, pipelines: int) -> Iterator[tuple[int, ...]]:
    """All shares of the micro-batches for so many pipelines."""
    for inner in combinations(range(1, micro_batches), pipelines - 1) if pipelines else ():
        yield tuple(stop - start for start, stop in pairwise((0, *inner, micro_batches)))
