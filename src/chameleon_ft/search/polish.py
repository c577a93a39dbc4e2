"""Better pipelines on workers: local search from those that are placed, and all pipelines on small clusters.

Local search changes cuts, recomputation, shares, workers and programs. Branch and bound is for small clusters in which
gradient sync or links decide. All other searches choose pipelines by a lower bound of gradient sync and place them
afterwards. The pipelines of least bound may have to reduce gradients between hosts, where others, which compute longer,
need not. In branch and bound a pipeline is a route over hosts from the start, and only the incumbent rules any out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, pairwise, product
from typing import Final, TypeAlias

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.step import total_work_bound_s
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.bounds import SyncCost, SyncLowerBound
from chameleon_ft.search.pipelines import PipelineSearch, PipelineSpec, TimedPipeline, synced_s
from chameleon_ft.search.placement import GradientSync, PlacedPipelines, links_are_equal
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.worker_classes import arrangements

# Neighbours that are scheduled in a round, those with the least estimates.
_TRIES: Final = 8
_ROUNDS: Final = 6
# Of the pipelines with different programs, this many of the slowest are changed.
_PIPELINES: Final = 3
# Polishing a plan may spend this many times the effort of a search; the round that passes it is the last.
_EFFORT: Final = 4
# With up to this many workers, every pair is exchanged.
_FEW_WORKERS: Final = 16
# Layers are moved away from this many of the stages that compute longest.
_SLOW_STAGES: Final = 3


class Polish:
    """Improves pipelines on workers, step by step, as long as the step becomes shorter."""

    def __init__(
        self, pipelines: Sequence[PipelineSearch], sync: GradientSync, cluster: Cluster, options: SearchOptions
    ) -> None:
        self._searches = {each.scheduler: each for each in pipelines}
        self._sync = sync
        self._options = options
        self._class_of = pipelines[0].scheduler.pool.class_of()
        self._hosts = cluster.hosts
        self._badly_linked = frozenset(cluster.badly_linked)
        self._equal_links = links_are_equal(cluster)

    def with_best_programs(self, pipelines: PlacedPipelines) -> PlacedPipelines:
        """Give every pipeline the program that `best_program` makes of it."""
        best: dict[TimedPipeline, TimedPipeline] = {}
        # Of equal pipelines, the last one's workers count.
        for timed, workers in dict(pipelines).items():
            found = timed.scheduler.scheduled(timed.spec, effort=self._options.polish_effort, workers=workers)
            best[timed] = timed if found is None else found.scheduler.loosened(found, workers=workers, best_s=math.inf)
        return tuple((best[timed], workers) for timed, workers in pipelines)

    def improved(self, pipelines: PlacedPipelines, *, exchange: bool = True) -> PlacedPipelines:
        """Give pipelines neighbouring cuts, recomputation and shares, by steepest descent.

        With `exchange`, workers may take each other's place too.

        How long a pipeline takes differs by some hundredths between cuts whose bounds hardly do, and gradient sync
        depends on where the stages of all pipelines stop.
        """
        if not exchange:
            return self._descended(pipelines, self._recut_or_shifted)
        return self._descended(pipelines, lambda own: chain(self._recut_or_shifted(own), self._exchanges(own)))

    def exchanged(self, pipelines: PlacedPipelines) -> PlacedPipelines:
        """Exchange workers, by steepest descent."""
        return self._descended(pipelines, self._exchanges)

    def _descended(
        self, pipelines: PlacedPipelines, neighbours: Callable[[PlacedPipelines], Iterator[PlacedPipelines]]
    ) -> PlacedPipelines:
        best, best_s = pipelines, self._sync.step_s(pipelines)
        most = self._spent() + _EFFORT * self._options.effort
        for _ in range(_ROUNDS):
            if self._spent() > most:
                break
            found = min(neighbours(best), key=self._sync.step_s, default=best)
            found_s = self._sync.step_s(found)
            if found_s >= best_s * (1 - ROUNDING):
                break
            best, best_s = found, found_s
        return best

    def _spent(self) -> int:
        return sum(each.spent for each in self._searches)

    def _recut_or_shifted(self, pipelines: PlacedPipelines) -> Iterator[PlacedPipelines]:
        """Yield pipelines of which some of the slowest are cut otherwise, or give up a micro-batch."""
        different = dict.fromkeys(timed for timed, _ in pipelines)
        # Others than the slowest may hold up gradient sync.
        by_time = sorted(different, key=lambda timed: -timed.program_s)
        for timed in by_time[:_PIPELINES]:
            by_estimate = sorted(self._recut(timed), key=lambda own: (own[0], own[1].cut_points, own[1].options))
            for _, spec in by_estimate[:_TRIES]:
                # All pipelines that are cut alike, so that they still reduce gradients together; or this one alone.
                alike = [
                    each
                    for each, _ in pipelines
                    if each.scheduler is timed.scheduler
                    and replace(each.spec, micro_batches=timed.spec.micro_batches) == timed.spec
                ]
                for changing in (alike, [timed]):
                    cut, options = spec.cut_points, spec.options
                    specs = [(each, replace(each.spec, cut_points=cut, options=options)) for each in changing]
                    changed = self._changed(pipelines, specs)
                    if changed is not None:
                        yield changed
        shifted = self._shifted(pipelines, by_time[0])
        if shifted is not None:
            yield shifted

    def _exchanges(self, pipelines: PlacedPipelines) -> Iterator[PlacedPipelines]:
        """Yield pipelines of which two workers of a class take each other's place, where their links differ.

        They are on different hosts, or some links of one of them are slow. One of the two may be idle.
        """
        used = [worker for _, workers in pipelines for worker in workers]
        if self._equal_links:
            return
        is_small = len(used) <= _FEW_WORKERS
        idle = self._hosts.keys() - set(used)
        for one, other in combinations([*used, *sorted(idle)], 2):
            if one in idle:
                return
            differ = bool({one, other} & self._badly_linked) or (is_small and self._hosts[one] != self._hosts[other])
            if differ and self._class_of[one] == self._class_of[other]:
                exchange = {one: other, other: one}
                placed = [(timed, tuple(exchange.get(own, own) for own in workers)) for timed, workers in pipelines]
                yield tuple((timed.scheduler.replayed(timed, workers), workers) for timed, workers in placed)

    def _recut(self, timed: TimedPipeline) -> Iterator[tuple[float, PipelineSpec]]:
        """Yield cuts with a layer moved from a slow stage to another one, and other options of a stage, with estimates.

        If the stages are not neighbours, all stages between them shift by a layer.
        """
        spec, estimates = timed.spec, self._searches[timed.scheduler].estimates
        tables = estimates.tables
        work_s: list[float] = []
        for kind, layers, option in zip(spec.shape, pairwise((0, *spec.cut_points)), spec.options, strict=True):
            at = kind, *layers
            seconds = (
                tables.forward_s[at]
                + tables.backward_s[at]
                + (tables.weight_s[at] + tables.options["recompute_s"][option])
            )
            work_s.append(float(seconds))
        stages = range(len(work_s))
        for less in sorted(stages, key=lambda stage: -work_s[stage])[:_SLOW_STAGES]:
            for more in stages:
                low, high, shift = min(less, more), max(less, more), 1 if more < less else -1
                shifted = tuple(stop + shift for stop in spec.cut_points[low:high])
                cut_points = (*spec.cut_points[:low], *shifted, *spec.cut_points[high:])
                if less != more and all(start < stop for start, stop in pairwise((0, *cut_points))):
                    for own_s, options in estimates.chosen(spec.shape, cut_points, spec.micro_batches):
                        yield own_s, replace(spec, cut_points=cut_points, options=options)
        for stage, options_of in enumerate(estimates.stages.options_of(spec.shape, spec.cut_points)):
            for option in (spec.options[stage] - 1, spec.options[stage] + 1):
                if option in options_of:
                    options = (*spec.options[:stage], option, *spec.options[stage + 1 :])
                    own_s = estimates.bound_s(spec.shape, spec.cut_points, spec.micro_batches, options)
                    yield own_s, replace(spec, options=options)

    def _shifted(self, pipelines: PlacedPipelines, slowest: TimedPipeline) -> PlacedPipelines | None:
        """Return the pipelines with a micro-batch less on the slowest ones, and one more on those that end first."""
        every = [timed for timed, _ in pipelines]
        quickest = min(every, key=lambda timed: timed.program_s)
        if slowest is quickest or slowest.spec.micro_batches < 2:
            return None
        fewer = replace(slowest.spec, micro_batches=slowest.spec.micro_batches - 1)
        more = replace(quickest.spec, micro_batches=quickest.spec.micro_batches + 1)
        number = min(every.count(slowest), every.count(quickest))
        return self._changed(pipelines, [(slowest, fewer), (quickest, more)] * number)

    def _changed(
        self, pipelines: PlacedPipelines, specs: Iterable[tuple[TimedPipeline, PipelineSpec]]
    ) -> PlacedPipelines | None:
        """Return the pipelines with other specs for some, the first of equals; None if one of these does not fit."""
        left: dict[TimedPipeline, list[PipelineSpec]] = defaultdict(list)
        for timed, spec in specs:
            left[timed].append(spec)
        found: list[tuple[TimedPipeline, tuple[int, ...]]] = []
        for timed, workers in pipelines:
            changed: TimedPipeline | None = timed
            if left[timed]:
                spec = left[timed].pop()
                changed = timed.scheduler.scheduled(spec, effort=self._options.look_effort, workers=workers)
            if changed is None:
                return None
            found.append((changed, workers))
        return tuple(found)


# Clusters with more routes are not searched.
_MAX_ROUTES: Final = 5_000
# The search ends after so much effort. Checking whether the workers of a route are free counts 1. The other steps take
# about this many times as long: adding a pipeline, comparing a plan (per worker), scheduling a pipeline.
_MOST: Final = 2_000_000
_ADD: Final = 10
_COMPARE: Final = 20
_SCHEDULE: Final = 1_000

_Group: TypeAlias = tuple[int, str]
"""Class and host: workers of one group are interchangeable."""
_Route: TypeAlias = tuple[_Group, ...]
"""The groups of the workers of a pipeline, first stage to last."""
_Part: TypeAlias = tuple[_Route, int]
"""A pipeline before it is cut: its route and its micro-batches."""


class ExhaustiveSearch:
    """Branch and bound over the workers of each pipeline, its share, its cut, and the layers that it recomputes."""

    def __init__(
        self, pipelines: Sequence[PipelineSearch], sync: GradientSync, costs: CostModel, options: SearchOptions
    ) -> None:
        self._searches = pipelines
        self._sync = sync
        self._costs = costs
        self._options = options
        class_of, equal_links = pipelines[0].scheduler.pool.class_of(), links_are_equal(costs.cluster)
        self._members: dict[_Group, list[int]] = {}
        for worker in costs.cluster.workers:
            group = class_of[worker.id], "" if equal_links else worker.host
            self._members.setdefault(group, []).append(worker.id)
        self._speeds = {group: costs.cluster.worker(own[0]).speed for group, own in self._members.items()}
        # Seconds of one micro-batch on a worker of speed 1.
        self._work_s = total_work_bound_s(costs, micro_batches=1) * sum(each.speed for each in costs.cluster.workers)
        self._best: PlacedPipelines = ()
        self._best_s = math.inf
        self._min_sync = SyncCost()
        self._spent = 0
        self._known: dict[tuple[object, ...], list[tuple[float, TimedPipeline]]] = {}

    def improved(self, best: PlacedPipelines) -> PlacedPipelines:
        """Return the pipelines of least step time that the effort finds; `best` if none of them is faster.

        Only plans with at least as many pipelines as layers are to have holders.
        """
        self._best, self._best_s, self._spent = best, self._sync.step_s(best), 0
        self._min_sync = SyncLowerBound(self._costs, self._best_s).of(2)
        free = Counter({group: len(own) for group, own in self._members.items()})
        deepest = min(free.total(), len(self._costs.workload.layers))
        every = (route for depth in range(deepest, 0, -1) for route in arrangements(free, depth))
        routes = [(route, Counter(route)) for route in islice(every, _MAX_ROUTES + 1)]
        if len(routes) <= _MAX_ROUTES:
            self._extend((), routes, free, self._costs.workload.micro_batches)
        return self._best

    def _extend(
        self,
        parts: tuple[_Part, ...],
        routes: Sequence[tuple[_Route, Counter[_Group]]],
        free: Counter[_Group],
        left: int,
    ) -> None:
        """Add pipelines over some of the routes, in their order, until no micro-batch is left."""
        self._spent += len(routes)
        routes = [(route, needs) for route, needs in routes if needs <= free]
        for place, (route, needs) in enumerate(routes):
            rest = free - needs
            speed = sum(self._speeds[group] * count for group, count in rest.items())
            for share in range(1, left + 1):
                # The workers that are left have to finish the others in less time than the best plan.
                if (left - share) * self._work_s > self._best_s * speed:
                    continue
                part = route, share
                self._spent += _ADD
                if self._spent > _MOST or not self._timed(part):
                    break
                if share == left:
                    self._try((*parts, part))
                else:
                    self._extend((*parts, part), routes[place:], rest, left - share)

    def _try(self, parts: Sequence[_Part]) -> None:
        """Compare all cuts and options of these pipelines with the best plan."""
        if len(parts) < self._options.min_holders:
            return
        workers = self._workers(parts)
        for timed in product(*map(self._timed, parts)):
            self._spent += _COMPARE * sum(map(len, workers))
            placed = tuple(zip(timed, workers, strict=True))
            own_s = self._sync.step_s(placed)
            if own_s < self._best_s * (1 - ROUNDING):
                self._best, self._best_s = placed, own_s

    def _timed(self, part: _Part) -> list[TimedPipeline]:
        """Return the pipeline with every cut and option with which it may take less time than the best plan."""
        route, share = part
        shape = tuple(kind for kind, _ in route)
        key = shape, tuple(one == other for (_, one), (_, other) in pairwise(route)), share
        if key not in self._known:
            (workers,) = self._workers([part])
            alone = share == self._costs.workload.micro_batches
            found: list[tuple[float, TimedPipeline]] = []
            for search in self._searches:
                bounds = search.bounds_with(SyncCost() if alone else self._min_sync)
                for _, spec in search.specs(shape, share, bounds, self._best_s):
                    self._spent += _SCHEDULE
                    timed = search.scheduler.scheduled(spec, effort=self._options.polish_effort, workers=workers)
                    if timed is not None:
                        timed = search.scheduler.loosened(timed, workers=workers, best_s=self._best_s)
                        found.append((synced_s(timed, bounds), timed))
            self._known[key] = _undominated(found)
        return [timed for min_s, timed in self._known[key] if min_s < self._best_s * (1 - ROUNDING)]

    def _workers(self, parts: Sequence[_Part]) -> list[tuple[int, ...]]:
        """Return the first workers of the groups of each pipeline that are left by those before it."""
        free = {group: iter(own) for group, own in self._members.items()}
        return [tuple(next(free[group]) for group in route) for route, _ in parts]


def _undominated(found: Sequence[tuple[float, TimedPipeline]]) -> list[tuple[float, TimedPipeline]]:
    """Return the pipelines of which none with the same cut ends sooner at every stage, those of least time first."""
    kept: list[tuple[float, TimedPipeline]] = []
    for min_s, timed in sorted(found, key=lambda own: (own[0], sum(own[1].ends_s))):
        alike = (each.ends_s for _, each in kept if each.cut_points == timed.cut_points)
        if not any(all(one <= other for one, other in zip(ends_s, timed.ends_s, strict=True)) for ends_s in alike):
            kept.append((min_s, timed))
    return kept
