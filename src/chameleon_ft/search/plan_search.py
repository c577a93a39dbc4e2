"""The search for pipelines on given workers: bounds, layouts and mixes, placement, polishing, and the certificate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice, product
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.estimate import total_work_bound_s
from chameleon_ft.plan import Placement
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.placement.candidates import Candidate, PlacedPipelines, figures
from chameleon_ft.search.placement.exhaustive import ExhaustiveSearch
from chameleon_ft.search.placement.gradient_sync import (
    GradientSync,
    SyncCost,
    SyncLowerBound,
    has_gradients,
    links_are_equal,
    numbers_of_pipelines,
)
from chameleon_ft.search.infeasible import fitting_pipeline
from chameleon_ft.search.mixes.knapsack import is_exact
from chameleon_ft.search.mixes.equal_depths import promising_layouts
from chameleon_ft.search.mixes.mix_search import MixSearch, TimedMix
from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.pipeline_search import PipelineSearch
from chameleon_ft.search.placement.hosts import PlacementSearch, assigned_workers, smaller_clusters
from chameleon_ft.search.placement.polish import Polish
from chameleon_ft.search.recut import recut
from chameleon_ft.search.result import FoundPlan, pareto_front
from chameleon_ft.search.pipelines.schedules import PipelineScheduler, PipelineSpec, TimedPipeline
from chameleon_ft.search.pipelines.stages import Stages
from chameleon_ft.search.pipelines.worker_classes import Shape, WorkerPool

__all__ = ["PlanSearch", "bound_of_best_workers_s"]

# Mixes of each search that are placed on workers; the best plan and its alternatives are chosen among them.
_MIXES_PLACED: Final = 2
# Plans that are polished and moved to the workers that hold most of their layers already.
_POLISHED: Final = 2
# Mixes that take this many times as long as the best plan so far are not placed.
_CLOSE: Final = 1.01
# A plan that takes more than this many times the bound is far from it.
_FAR: Final = 1.1
# Layouts that are scheduled when effort is limited.
_LAYOUTS: Final = 8
# Placed workers, summed over the mixes, after which a search settles for the best mix: in large clusters, placement
# takes longer than scheduling.
_PLACED: Final = 40_000
# Mixes of at most this many different pipelines are placed with other cuts, too.
_FEW_PROGRAMS: Final = 3
# Searches for mixes together may spend this many times the effort; the one that passes it is the last.
_EFFORT: Final = 4
# Pipelines are alike if they are at most this many times as deep as the mean, or as shallow.
_ALIKE: Final = 1.5
# Layouts whose estimate is this many times the best step time so far are not scheduled.
_WORSE: Final = 1.02


class PlanSearch:
    """Pipelines with split and with fused backward, in any number.

    Gradient sync depends on how many pipelines there are, so there is a bound for every number, or for a few that are
    alike; the least of them is the bound.

    Args:
        costs: costs of the workload on the live workers.
        cluster: that of `costs` with few classes of workers, see `merged_clusters`.
        current: which layers the live workers hold now.
        options: of the search.
    """

    def __init__(self, costs: CostModel, cluster: Cluster, current: Placement | None, options: SearchOptions) -> None:
        self._all_classes = cluster == costs.cluster
        self._real_costs = costs
        self._costs = CostModel(costs.workload, cluster)
        self._current = current
        self._pool = WorkerPool.of(cluster)
        stages = [Stages(self._costs, self._pool.classes, split_backward=split) for split in (True, False)]
        self._is_small = not options.complete and all(each.has_fewer_hops(options.small) for each in stages)
        self._options = options
        self._searches = [PipelineSearch(PipelineScheduler(own, self._pool, options), options) for own in stages]
        self._start(self._costs)

    def _start(self, costs: CostModel) -> None:
        self._costs = costs
        self._with_sync = has_gradients(costs.workload) and len(costs.cluster.workers) > 1
        self._sync = GradientSync(costs)
        self._placement = PlacementSearch(self._pool, costs.cluster, with_sync=self._with_sync)
        self._polish = Polish(self._searches, self._sync, costs.cluster, self._options)
        self._work_s = total_work_bound_s(costs)
        self.bound_s = math.inf
        self.mixes = 0
        self._placed_workers = 0
        self.complete = self._options.complete and not self._with_sync and links_are_equal(costs.cluster)

    def plans(self) -> Sequence[Candidate | FoundPlan]:
        """The fastest plans that were found, on the front of the figures that plans are chosen by."""
        found = self._found() or self._fitting()
        found += self._of_fewer_hosts(min((each.step_s for each in found), default=math.inf))
        found.sort(key=lambda each: each.step_s)
        if found and self._is_small and found[0].step_s > self.bound_s * (1 + self._options.slack):
            found = self._completed(found)
        self._certify()
        few = [self._polished(each) for each in _with_survivor(found[:_POLISHED], found)]
        few.sort(key=lambda each: each.step_s)
        front = pareto_front(self._assigned(few), figures)
        chosen = self._with_programs([*front, *self._recut()])
        # Workers may be faster than the slowest of their group.
        return chosen if self._all_classes else [each.found_on(self._real_costs) for each in chosen]

    def bound(self, most_s: float) -> float:
        """Seconds below which no pipelines can be that take no longer than `most_s`."""
        searches = self._bounding_searches(most_s)
        bound_s = most_s
        for search in searches:
            if search.reaches(bound_s):
                bound_s = min(bound_s, search.bound_s())
        return bound_s

    def _certify(self) -> None:
        if not (self._all_classes and self._is_exact):
            self.complete = False
            self.bound_s = bound_of_best_workers_s(self._real_costs, self.bound_s)
        # Bounds are exact but for the rounding of sums.
        self.bound_s *= 1 - ROUNDING

    @property
    def _is_exact(self) -> bool:
        """Whether every order of classes in a pipeline is looked at, and every mix of them."""
        search = self._mix_search(self._searches)
        return search.all_shapes and (len(self._pool.counts) == 1 or is_exact(self._pool.counts, 1))

    def _found(self, most_s: float = math.inf) -> list[Candidate]:
        """Plans on workers that take less than `most_s`; the bound of plans up to that is known afterwards."""
        if not self._with_sync:
            search = self._mix_search(self._searches)
            self.bound_s = search.bound_s()
            return self._run([search], most_s)
        found: list[Candidate] = []
        if len(self._pool.classes) == 1:
            found = self._of_layouts()
        best_s, number = min(((each.step_s, len(each.pipelines)) for each in found), default=(most_s, 1))
        best_s = min(best_s, most_s)
        # The least bound is likely that of about as many pipelines as the best layout has.
        searches = sorted(self._bounding_searches(best_s), key=lambda search: _distance(search, number))
        searches = self._bounded(searches, best_s)
        if len(self._pool.classes) == 1:
            searches = [each for search in searches for each in (self._alike(search), search)]
        return [*found, *self._run(searches, best_s)]

    def _alike(self, search: MixSearch) -> MixSearch:
        """The search among pipelines that are not much deeper or shallower than the mean of so many.

        The more alike pipelines are, the more of their gradients can be reduced together, of which bounds know nothing.
        """
        (workers,), (fewest, most) = self._pool.counts, search.pipeline_range or (1, 1)
        shallow, deep = workers / most / _ALIKE - 1, workers / fewest * _ALIKE + 1
        shapes = [shape for shape in search.shapes if shallow <= len(shape) <= deep]
        return self._mix_search(search.pipelines, search.sync, search.pipeline_range, shapes)

    def _bounding_searches(self, most_s: float) -> list[MixSearch]:
        """Searches whose mixes are all pipelines that take no longer than `most_s`."""
        if not self._with_sync:
            return [self._mix_search(self._searches)]
        least = SyncLowerBound(self._costs, most_s)
        most = min(len(self._costs.cluster.workers), self._costs.workload.micro_batches)
        pipeline_range = [(1, 1), *numbers_of_pipelines(most)]
        if len(self._pool.classes) > 1:
            pipeline_range = [(1, 1), *([(2, most)] if most > 1 else [])]
        return [self._mix_search(self._searches, least.of(own[0]), own) for own in pipeline_range]

    def _mix_search(
        self,
        pipelines: Sequence[PipelineSearch],
        sync: SyncCost = SyncCost(),  # noqa: B008 - frozen
        pipeline_range: tuple[int, int] | None = None,
        shapes: Sequence[Shape] | None = None,
    ) -> MixSearch:
        micro_batches, counts = self._costs.workload.micro_batches, self._pool.counts
        return MixSearch(
            pipelines,
            counts,
            micro_batches,
            self._work_s,
            self._options,
            sync=sync,
            pipeline_range=pipeline_range,
            shapes=shapes,
        )

    def _bounded(self, searches: Sequence[MixSearch], most_s: float = math.inf) -> list[MixSearch]:
        """The searches, those of least bound first; bounds are worked out as far as the least of all needs it."""
        self.bound_s = most_s
        bounds_s: list[float] = []
        for search in searches:
            bounds_s.append(search.bound_s() if search.reaches(self.bound_s) else math.inf)
            self.bound_s = min(self.bound_s, bounds_s[-1])
        by_bound = sorted(zip(bounds_s, range(len(searches)), strict=True))
        return [searches[number] for _, number in by_bound]

    def _of_layouts(self) -> list[Candidate]:
        """Plans of pipelines of about equal depth, those with the least estimates."""
        micro_batches = self._costs.workload.micro_batches
        least = SyncLowerBound(self._costs, math.inf)
        layouts = promising_layouts(self._searches, self._pool.counts, least, self._options, self._costs.workload)
        found: list[Candidate] = []
        best_s = math.inf
        tried = 0
        for layout in layouts:
            if tried == _LAYOUTS or (tried and layout.estimate_s > best_s * _WORSE) or self._placed_workers > _PLACED:
                break
            if self._options.is_expensive(layout.depth, micro_batches / layout.number) and tried:
                continue
            tried += 1
            for mixed in (False, True):
                pipeline_range = layout.number, layout.number
                search = self._mix_search([layout.pipelines], layout.sync, pipeline_range, layout.shapes(mixed=mixed))
                if mixed and layout.depth * layout.number == len(self._costs.cluster.workers):
                    break
                found += self._run([search], best_s)
                best_s = min([best_s, *(each.step_s for each in found)])
        return found

    def _fitting(self) -> list[Candidate]:
        """One pipeline of as few workers as can hold the model, where nothing else fits."""
        found: list[Candidate] = []
        for search in self._searches:
            stages = search.scheduler.stages
            fitting = fitting_pipeline(stages, self._pool.counts)
            if fitting is not None:
                shape, cut_points = fitting
                options = tuple(
                    stages.smallest_option(*own) for own in zip(shape, (0, *cut_points[:-1]), cut_points, strict=True)
                )
                timed = search.scheduler.scheduled(
                    PipelineSpec(shape, cut_points, options, self._costs.workload.micro_batches),
                    effort=self._options.look_effort,
                )
                if timed is not None:
                    found.append(self._candidate(((timed, self._pool.sample(shape)),)))
        return found

    def _run(self, searches: Iterable[MixSearch], best_s: float = math.inf) -> list[Candidate]:
        """Plans of the mixes that the searches find."""
        found: list[Candidate] = []
        most = self._spent() + _EFFORT * self._options.effort
        for search in searches:
            too_many = self._placed_workers > _PLACED and not self._options.complete
            if found and (self._spent() > most or too_many):
                self.complete = False
                break
            if (self._options.two_holders and search.pipeline_range == (1, 1)) or not search.reaches(best_s):
                continue
            close_s = best_s * _CLOSE if self._with_sync else best_s
            mixes = list(search.mixes(max(self._work_s, search.bound_s()), close_s))
            self.complete = self.complete and search.complete
            self.mixes += len(mixes)
            for mix in islice(sorted(mixes, key=lambda mix: mix.time_s), _MIXES_PLACED):
                if mix.time_s < close_s:
                    found += self._placed(mix)
                    best_s = min([best_s, *(each.step_s for each in found)])
                    close_s = _CLOSE * best_s if self._with_sync else best_s
        return found

    def _spent(self) -> int:
        return sum(search.scheduler.spent for search in self._searches)

    def _placed(self, mix: TimedMix) -> list[Candidate]:
        """The mix on workers that are chosen by how long gradient sync takes.

        Where that would not survive the loss of some host, and another way to place it would, on these as well.
        """
        fastest, *survivor = self._on_workers([each for each, count in mix.pipelines for _ in range(count)])
        if self._with_sync and len(mix.pipelines) <= _FEW_PROGRAMS and len(fastest.pipelines) > 1:
            for cuts in product(*(self._search_of(each).similar(each) for each, _ in mix.pipelines)):
                counted = zip(cuts, mix.pipelines, strict=True)
                other, *_ = self._on_workers([each for each, (_, count) in counted for _ in range(count)])
                fastest = min(fastest, other, key=lambda each: each.step_s)
        better = self._polish.exchanged(fastest.pipelines)
        return [fastest if better is fastest.pipelines else self._candidate(better), *survivor]

    def _on_workers(self, timed: Sequence[TimedPipeline]) -> list[Candidate]:
        """The pipelines on the workers that make the step shortest, and on others that survive the loss of any host."""
        self._placed_workers += sum(len(each.cut_points) for each in timed)
        ways = self._placement.ways([each.spec.shape for each in timed], [each.cut_points for each in timed])
        placed = sorted(
            (self._candidate(tuple(zip(timed, way, strict=True))) for way in ways), key=lambda each: each.step_s
        )
        return [
            self._candidate(tuple((own.scheduler.replayed(own, workers), workers) for own, workers in each.pipelines))
            for each in _with_survivor(placed[:1], placed)
        ]

    def _candidate(self, pipelines: PlacedPipelines, name: str = "pipelines") -> Candidate:
        return Candidate(name, pipelines, self._sync.step_s(pipelines), self._costs, self._current)

    def _of_fewer_hosts(self, best_s: float) -> list[Candidate]:
        """Plans on the hosts with more workers alone, if the best plan so far is far from the bound."""
        found: list[Candidate] = []
        cluster = self._costs.cluster
        if not self._with_sync or links_are_equal(cluster) or not _FAR * self.bound_s < best_s < math.inf:
            return found
        for part in smaller_clusters(cluster):
            costs = CostModel(self._costs.workload, part)
            if total_work_bound_s(costs) < best_s:
                found += [replace(each, costs=self._costs, current=self._current) for each in self._of(costs)._found()]
                best_s = min([best_s, *(each.step_s for each in found)])
        return found

    def _of(self, costs: CostModel) -> PlanSearch:
        """A search over some of the workers that shares the schedules of this one."""
        part = copy(self)
        members = ([worker for worker in own if worker in costs.cluster.hosts] for own in self._pool.members)
        part._pool = WorkerPool(self._pool.classes, tuple(map(tuple, members)))
        part._start(costs)
        return part

    def _completed(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The plans with their final programs, and with what a complete search finds."""
        finished = self._with_programs(found)
        search, options = copy(self), self._options.completed()
        search._options = options
        search._searches = [
            PipelineSearch(PipelineScheduler(each.scheduler.stages, self._pool, options), options)
            for each in self._searches
        ]
        search._start(self._costs)
        finished += self._with_programs(search._found(min(each.step_s for each in finished)))
        self.mixes += search.mixes
        self.complete = search.complete and not any(each.cut_short for each in search._searches)
        self.bound_s = max(self.bound_s, search.bound_s)
        if self._with_sync or not links_are_equal(self._costs.cluster):
            best = min(finished, key=lambda each: each.step_s)
            exhaustive = ExhaustiveSearch(search._searches, self._sync, self._costs, options)
            finished.append(self._candidate(exhaustive.improved(best.pipelines)))
        self._polish = Polish([*self._searches, *search._searches], self._sync, self._costs.cluster, self._options)
        return sorted(finished, key=lambda each: each.step_s)

    def _with_programs(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The plans with the programs that will be run: orders made for other links may reduce gradients sooner."""
        return [self._candidate(self._polish.with_best_programs(each.pipelines), each.name) for each in found]

    def _polished(self, found: Candidate) -> Candidate:
        if self.complete:
            return found
        survives = found.survives_hosts
        better = self._candidate(self._polish.improved(found.pipelines, exchange=not survives))
        if survives:
            return better if better.survives_hosts else found
        # Where stages stop decides which workers should share a host.
        again, *_ = self._on_workers([timed for timed, _ in better.pipelines])
        if again.step_s < better.step_s:
            better = self._candidate(self._polish.improved(again.pipelines))
        return better

    def _search_of(self, timed: TimedPipeline) -> PipelineSearch:
        return self._searches[0 if timed.scheduler.split_backward else 1]

    def _assigned(self, few: Sequence[Candidate]) -> Iterator[Candidate]:
        """The plans on the workers that hold most of them, with stages on their hosts and on any."""
        if self._current is None:
            yield from few
            return
        for each in few:
            for keep_hosts in (True, False):
                workers = assigned_workers(
                    [(timed.cut_points, own) for timed, own in each.pipelines],
                    self._current,
                    self._costs.cluster,
                    self._costs.workload.layers,
                    keep_hosts=keep_hosts,
                )
                yield self._candidate(
                    tuple(
                        (timed.scheduler.replayed(timed, own), own)
                        for (timed, _), own in zip(each.pipelines, workers, strict=True)
                    )
                )
                if links_are_equal(self._costs.cluster):
                    break

    def _recut(self) -> Iterator[Candidate]:
        """With the whole pipelines of the current placement as they are, with split and with fused backward."""
        if self._current is None:
            return
        for search in self._searches:
            pipelines = recut(self._current, search, self._costs, self._options)
            if pipelines is not None:
                yield self._candidate(pipelines, "recut")


def _with_survivor(chosen: Sequence[Candidate], placed: Sequence[Candidate]) -> list[Candidate]:
    """The chosen candidates and, if none of them survives the loss of any host, the first placed one that does."""
    if any(each.survives_hosts for each in chosen):
        return list(chosen)
    return [*chosen, *islice((each for each in placed if each.survives_hosts), 1)]


def bound_of_best_workers_s(costs: CostModel, most_s: float = math.inf) -> float:
    """A bound on all pipelines up to `most_s`, as if every worker had the speed and the memory of the best."""
    workers = costs.cluster.workers
    speed = max(worker.speed for worker in workers)
    sizes = [worker.memory_bytes for worker in workers if worker.memory_bytes is not None]
    memory = max(sizes) if len(sizes) == len(workers) else None
    equals = tuple(replace(worker, speed=speed, memory_bytes=memory) for worker in workers)
    cluster = Cluster(equals, costs.cluster.intra_host, costs.cluster.inter_host)
    bound_s = PlanSearch(CostModel(costs.workload, cluster), cluster, None, SearchOptions()).bound(most_s)
    return max(bound_s, total_work_bound_s(costs)) * (1 - ROUNDING)


def _distance(search: MixSearch, number: int) -> int:
    """Return the distance of a number of pipelines from the range of a search."""
    fewest, most = search.pipeline_range or (number, number)
    return max(0, fewest - number, number - most)
