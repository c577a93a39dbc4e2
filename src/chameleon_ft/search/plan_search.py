"""The search for pipelines on given workers: bounds, layouts and mixes, placement, polishing, and the certificate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise, product
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.step import total_work_bound_s
from chameleon_ft.plan import Placement
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.bounds import SyncLowerBound, has_gradients, numbers_of_pipelines
from chameleon_ft.search.infeasible import fitting_pipeline
from chameleon_ft.search.knapsack import is_exact
from chameleon_ft.search.mixes import MixSearch, TimedMix, promising_layouts, shapes_of
from chameleon_ft.search.pipelines import PipelineScheduler, PipelineSearch, PipelineSpec, TimedPipeline
from chameleon_ft.search.placement import (
    Candidate,
    GradientSync,
    PlacedPipelines,
    assigned_workers,
    figures,
    links_are_equal,
    smaller_clusters,
    worker_choices,
)
from chameleon_ft.search.polish import ExhaustiveSearch, Polish
from chameleon_ft.search.recut import recut
from chameleon_ft.search.result import FoundPlan, SearchOptions, pareto_front
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerPool

# Mixes of each search that are placed on workers, as candidates for the best plan and its alternatives.
_MIXES_PLACED: Final = 2
# Plans that are polished and moved to the workers that already hold most of their layers.
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
# All searches for mixes together may spend this many times the effort; the one that exceeds it is the last.
_EFFORT: Final = 4
# Pipelines are alike if their depth is within this factor of the mean.
_ALIKE: Final = 1.5
# Layouts whose estimate is this many times the best step time so far are not scheduled.
_WORSE: Final = 1.02


class PlanSearch:
    """Pipelines with split and with fused backward, in any number.

    Gradient sync depends on the number of pipelines, so each number, or a few similar ones, has its own bound; the
    least is the bound of the search.

    Args:
        costs: costs of the workload on the live workers.
        cluster: the cluster of `costs` with few classes of workers, see `merged_clusters`.
        current: layers that the live workers hold now.
        options: options of the search.

    Attributes:
        bound_s, exhaustive, mixes: see `SearchResult`.
    """

    def __init__(self, costs: CostModel, cluster: Cluster, current: Placement | None, options: SearchOptions) -> None:
        self._real_costs = costs
        self._current = current
        self._pool = WorkerPool.of(cluster)
        merged = CostModel(costs.workload, cluster)
        stages = [Stages(merged, self._pool.classes, split_backward=split) for split in (True, False)]
        self._is_small = not options.complete and all(each.has_fewer_hops(options.small) for each in stages)
        self._options = options
        self._searches = [PipelineSearch(PipelineScheduler(own, self._pool, options), options) for own in stages]
        self._start(merged)

    def _start(self, costs: CostModel) -> None:
        self._costs = costs
        self._with_sync = has_gradients(costs.workload) and len(costs.cluster.workers) > 1
        self._equal_links = links_are_equal(costs.cluster)
        self._sync = GradientSync(costs)
        self._polish = Polish(self._searches, self._sync, costs.cluster, self._options)
        self._work_s = total_work_bound_s(costs)
        self._mix_search = partial(
            MixSearch,
            counts=self._pool.counts,
            micro_batches=costs.workload.micro_batches,
            work_s=self._work_s,
            options=self._options,
        )
        self.bound_s = math.inf
        self.mixes = 0
        self._placed_workers = 0
        self.exhaustive = self._options.complete and not self._with_sync and self._equal_links

    def plans(self) -> list[FoundPlan]:
        """Return the fastest plans found, on the Pareto front of the figures for choosing plans."""
        found = self._found() or self._fitting()
        found += self._of_fewer_hosts(min((each.step_s for each in found), default=math.inf))
        found.sort(key=lambda each: each.step_s)
        if found and self._is_small and found[0].step_s > self.bound_s * (1 + self._options.slack):
            found = self._completed(found)
        self._certify()
        few = [self._polished(each) for each in _with_survivor(found[:_POLISHED], found)]
        few.sort(key=lambda each: each.step_s)
        front = pareto_front(self._assigned(few), figures)
        # Workers may be faster than the slowest of their group.
        return [each.found_on(self._real_costs) for each in self._with_programs([*front, *self._recut()])]

    def bound(self, max_s: float) -> float:
        """Return a lower bound, in seconds, on the pipelines that take no longer than `max_s`."""
        self._bounded(self._bounding_searches(max_s), max_s)
        return self.bound_s

    def _certify(self) -> None:
        """Correct the bound if some orders of classes in a pipeline, or some mixes, are not searched."""
        counts = self._pool.counts
        _, all_shapes = shapes_of(counts, len(self._costs.workload.layers))
        is_exact_search = all_shapes and (len(counts) == 1 or is_exact(counts, 1))
        if not is_exact_search or self._costs.cluster != self._real_costs.cluster:
            self.exhaustive = False
            self.bound_s = bound_of_best_workers_s(self._real_costs, self.bound_s)
        # Bounds are exact up to the rounding of sums.
        self.bound_s *= 1 - ROUNDING

    def _found(self, max_s: float = math.inf) -> list[Candidate]:
        """Return plans on workers that take less than `max_s`, and set the bound of plans up to that."""
        by_layout = self._with_sync and len(self._pool.classes) == 1
        found = self._of_layouts() if by_layout else []
        best_s, number = min(((each.step_s, len(each.pipelines)) for each in found), default=(max_s, 1))
        best_s = min(best_s, max_s)
        # The least bound usually belongs to about as many pipelines as the best layout has.
        searches = sorted(self._bounding_searches(best_s), key=lambda search: _distance(search, number))
        searches = self._bounded(searches, best_s)
        if by_layout:
            searches = [each for search in searches for each in (self._alike(search), search)]
        return [*found, *self._run(searches, best_s)]

    def _alike(self, search: MixSearch) -> MixSearch:
        """Return the search among pipelines whose depth is close to the mean of so many.

        The more alike pipelines are, the more gradients can be reduced together, which bounds ignore.
        """
        (workers,), (fewest, most) = self._pool.counts, search.pipeline_range or (1, 1)
        shallow, deep = workers / most / _ALIKE - 1, workers / fewest * _ALIKE + 1
        shapes = [shape for shape in search.shapes if shallow <= len(shape) <= deep]
        return self._mix_search(search.pipelines, sync=search.sync, pipeline_range=search.pipeline_range, shapes=shapes)

    def _bounding_searches(self, max_s: float) -> list[MixSearch]:
        """Return searches that together cover all pipelines that take no longer than `max_s`.

        In each of them, all mixes have at least as many pipelines as layers are to have holders, or all have fewer.
        """
        asked = self._options.min_holders
        if not self._with_sync and asked == 1:
            return [self._mix_search(self._searches)]
        least = SyncLowerBound(self._costs, max_s)
        most = min(len(self._costs.cluster.workers), self._costs.workload.micro_batches)
        ranges = [(1, 1), *numbers_of_pipelines(most)]
        if len(self._pool.classes) > 1 or not self._with_sync:
            ranges = [(1, 1), (2, most)]
        cut = [part for first, last in ranges for part in ((first, min(last, asked - 1)), (max(first, asked), last))]
        return [
            self._mix_search(self._searches, sync=least.of(own[0]), pipeline_range=own)
            for own in cut
            if own[0] <= own[1]
        ]

    def _bounded(self, searches: Iterable[MixSearch], max_s: float) -> list[MixSearch]:
        """Return the searches in order of their bounds, and set `bound_s`; only the least bound need be exact."""
        self.bound_s = max_s
        bounds_s: dict[MixSearch, float] = {}
        for search in searches:
            bounds_s[search] = search.bound_s if search.reaches(self.bound_s) else math.inf
            self.bound_s = min(self.bound_s, bounds_s[search])
        return sorted(bounds_s, key=bounds_s.__getitem__)

    def _of_layouts(self) -> list[Candidate]:
        """Return plans of pipelines of about equal depth, those with the least estimates."""
        workload, workers = self._costs.workload, len(self._costs.cluster.workers)
        least = SyncLowerBound(self._costs, math.inf)
        found: list[Candidate] = []
        best_s = math.inf
        tried = 0
        for layout in promising_layouts(self._searches, workers, least, self._options, workload):
            if tried == _LAYOUTS or (tried and layout.estimate_s > best_s * _WORSE) or self._placed_workers > _PLACED:
                break
            if self._options.is_expensive(layout.depth, workload.micro_batches / layout.number) and tried:
                continue
            tried += 1
            for mixed in (False, True) if layout.depth * layout.number < workers else (False,):
                numbers = layout.number, layout.number
                search = self._mix_search(
                    [layout.pipelines], sync=layout.sync, pipeline_range=numbers, shapes=layout.shapes(mixed=mixed)
                )
                found += self._run([search], best_s)
                best_s = min([best_s, *(each.step_s for each in found)])
        return found

    def _fitting(self) -> list[Candidate]:
        """Return one pipeline of the fewest workers that can hold the model, for when nothing else fits."""
        found: list[Candidate] = []
        for search in self._searches:
            stages = search.scheduler.stages
            fitting = fitting_pipeline(stages, self._pool.counts)
            if fitting is not None:
                shape, cut_points = fitting
                ranges = pairwise((0, *cut_points))
                options = tuple(stages.smallest_option(kind, *own) for kind, own in zip(shape, ranges, strict=True))
                spec = PipelineSpec(shape, cut_points, options, self._costs.workload.micro_batches)
                timed = search.scheduler.scheduled(spec, effort=self._options.look_effort)
                if timed is not None:
                    found.append(self._candidate(((timed, self._pool.sample(shape)),)))
        return found

    def _run(self, searches: Iterable[MixSearch], best_s: float) -> list[Candidate]:
        """Return plans of the mixes that the searches find."""
        found: list[Candidate] = []
        most = self._spent() + _EFFORT * self._options.effort
        for search in searches:
            too_many = self._placed_workers > _PLACED and not self._options.complete
            if found and (self._spent() > most or too_many):
                self.exhaustive = False
                break
            has_few = search.pipeline_range is not None and search.pipeline_range[1] < self._options.min_holders
            if has_few or not search.reaches(best_s):
                continue
            close_s = best_s * _CLOSE if self._with_sync else best_s
            mixes = list(search.mixes(max(self._work_s, search.bound_s), close_s))
            self.exhaustive = self.exhaustive and search.complete
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
        """Return the mix on the workers for which gradient sync takes least time.

        If that placement does not survive the loss of some host and another one does, return both.
        """
        fastest, *survivor = self._on_workers([each for each, count in mix.pipelines for _ in range(count)])
        if self._with_sync and len(mix.pipelines) <= _FEW_PROGRAMS and len(fastest.pipelines) > 1:
            searches = {each.scheduler: each for each in self._searches}
            for cuts in product(*(searches[each.scheduler].similar(each) for each, _ in mix.pipelines)):
                counted = zip(cuts, mix.pipelines, strict=True)
                other, *_ = self._on_workers([each for each, (_, count) in counted for _ in range(count)])
                fastest = min(fastest, other, key=lambda each: each.step_s)
        better = self._polish.exchanged(fastest.pipelines)
        return [fastest if better is fastest.pipelines else self._candidate(better), *survivor]

    def _on_workers(self, timed: Sequence[TimedPipeline]) -> list[Candidate]:
        """Return the pipelines on the workers of the shortest step, and on others that survive any host's loss."""
        cuts = [each.cut_points for each in timed]
        self._placed_workers += sum(map(len, cuts))
        choices = worker_choices(
            [each.spec.shape for each in timed], cuts, self._pool, self._costs.cluster, with_sync=self._with_sync
        )
        placed = [self._candidate(tuple(zip(timed, workers, strict=True))) for workers in choices]
        placed.sort(key=lambda each: each.step_s)
        return [self._replayed(each.pipelines) for each in _with_survivor(placed[:1], placed)]

    def _candidate(self, pipelines: PlacedPipelines, name: str = "pipelines") -> Candidate:
        return Candidate(name, pipelines, self._sync.step_s(pipelines), self._costs, self._current)

    def _replayed(self, pipelines: PlacedPipelines) -> Candidate:
        """Return the pipelines with the times that follow from the links between their workers."""
        return self._candidate(tuple((timed.scheduler.replayed(timed, own), own) for timed, own in pipelines))

    def _of_fewer_hosts(self, best_s: float) -> list[Candidate]:
        """Return plans on only the hosts with more workers, if the best plan so far is far from the bound."""
        found: list[Candidate] = []
        if not self._with_sync or self._equal_links or not _FAR * self.bound_s < best_s < math.inf:
            return found
        for cluster in smaller_clusters(self._costs.cluster):
            costs = CostModel(self._costs.workload, cluster)
            if total_work_bound_s(costs) < best_s:
                # A search over some of the workers that shares the schedules of this one.
                part = copy(self)
                members = (tuple(own for own in each if own in cluster.hosts) for each in self._pool.members)
                part._pool = WorkerPool(self._pool.classes, tuple(members))
                part._start(costs)
                found += [replace(each, costs=self._costs) for each in part._found()]
                best_s = min([best_s, *(each.step_s for each in found)])
        return found

    def _completed(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return the plans with their final programs, and the plans of a complete search."""
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
        self.exhaustive = search.exhaustive and not any(each.cut_short for each in search._searches)
        self.bound_s = max(self.bound_s, search.bound_s)
        if self._with_sync or not self._equal_links:
            best = min(finished, key=lambda each: each.step_s)
            exhaustive = ExhaustiveSearch(search._searches, self._sync, self._costs, options)
            finished.append(self._candidate(exhaustive.improved(best.pipelines)))
        self._polish = Polish([*self._searches, *search._searches], self._sync, self._costs.cluster, self._options)
        return sorted(finished, key=lambda each: each.step_s)

    def _with_programs(self, found: Iterable[Candidate]) -> list[Candidate]:
        """Return the plans with their final programs, because orders made for other links may be worse."""
        return [self._candidate(self._polish.with_best_programs(each.pipelines), each.name) for each in found]

    def _polished(self, found: Candidate) -> Candidate:
        if self.exhaustive:
            return found
        survives = found.survives_hosts
        better = self._candidate(self._polish.improved(found.pipelines, exchange=not survives))
        if survives:
            return better if better.survives_hosts else found
        # The cut points decide which workers should share a host.
        again, *_ = self._on_workers([timed for timed, _ in better.pipelines])
        if again.step_s < better.step_s:
            better = self._candidate(self._polish.improved(again.pipelines))
        return better

    def _assigned(self, few: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the plans on the workers that hold most of their layers, with stages on their hosts and on any."""
        if self._current is None:
            yield from few
            return
        cluster, layers = self._costs.cluster, self._costs.workload.layers
        for each in few:
            stages = [(timed.cut_points, workers) for timed, workers in each.pipelines]
            for keep_hosts in (True,) if self._equal_links else (True, False):
                roles = assigned_workers(stages, self._current, cluster, layers, keep_hosts=keep_hosts)
                yield self._replayed(
                    tuple((timed, tuple(roles[own] for own in workers)) for timed, workers in each.pipelines)
                )

    def _recut(self) -> Iterator[Candidate]:
        """Yield plans that keep the whole pipelines of the current placement, with split and with fused backward."""
        if self._current is not None:
            for search in self._searches:
                pipelines = recut(self._current, search, self._costs, self._options)
                if pipelines is not None:
                    yield self._candidate(pipelines, "recut")


def _with_survivor(chosen: Sequence[Candidate], placed: Sequence[Candidate]) -> list[Candidate]:
    """Return the chosen candidates and, if none of them survives any host's loss, the first placed one that does."""
    if any(each.survives_hosts for each in chosen):
        return list(chosen)
    return [*chosen, *islice((each for each in placed if each.survives_hosts), 1)]


def bound_of_best_workers_s(costs: CostModel, max_s: float = math.inf) -> float:
    """Return a bound on all pipelines up to `max_s`, as if every worker had the speed and the memory of the best."""
    workers = costs.cluster.workers
    speed = max(worker.speed for worker in workers)
    sizes = [worker.memory_bytes for worker in workers if worker.memory_bytes is not None]
    memory = max(sizes) if len(sizes) == len(workers) else None
    equals = tuple(replace(worker, speed=speed, memory_bytes=memory) for worker in workers)
    cluster = Cluster(equals, costs.cluster.intra_host, costs.cluster.inter_host)
    bound_s = PlanSearch(CostModel(costs.workload, cluster), cluster, None, SearchOptions()).bound(max_s)
    return max(bound_s, total_work_bound_s(costs)) * (1 - ROUNDING)


def _distance(search: MixSearch, number: int) -> int:
    """Return the distance of a number of pipelines from the range of a search."""
    fewest, most = search.pipeline_range or (number, number)
    return max(0, fewest - number, number - most)
