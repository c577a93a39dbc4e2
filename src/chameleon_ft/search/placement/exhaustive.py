"""All pipelines on all workers, by branch and bound: for small clusters in which gradient sync or links decide.

The other searches choose pipelines by a lower bound of gradient sync and place them afterwards. In a small cluster the
pipelines of least bound may have to reduce gradients between hosts, where others, which compute longer, need not. Here
a pipeline is a route over hosts from the start, and only the incumbent rules any out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise, product
from typing import Final, TypeAlias

from chameleon_ft.estimate import total_work_bound_s
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.pipeline_search import PipelineSearch, synced_s
from chameleon_ft.search.pipelines.schedules import TimedPipeline
from chameleon_ft.search.pipelines.sync_bounds import SyncCost, SyncLowerBound
from chameleon_ft.search.pipelines.worker_classes import arrangements
from chameleon_ft.search.placement.gradient_sync import GradientSync, PlacedPipelines, links_are_equal

# Clusters with more routes are not searched.
_MOST_ROUTES: Final = 5_000
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
    """Branch and bound over the workers of each pipeline, its share, its cut, and the layers that it recomputes.

    Args:
        pipelines: schedule them, with split and with fused backward.
        sync: gradient sync between them.
        costs: costs of the workload on the live workers.
        options: of the search.
    """

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
        self._least_sync = SyncCost()
        self._spent = 0
        self._known: dict[tuple[object, ...], list[tuple[float, TimedPipeline]]] = {}

    def improved(self, best: PlacedPipelines) -> PlacedPipelines:
        """Return the pipelines of least step time that the effort finds; `best` if none of them is faster.

        Only plans with at least as many pipelines as layers are to have holders.
        """
        self._best, self._best_s, self._spent = best, self._sync.step_s(best), 0
        self._least_sync = SyncLowerBound(self._costs, self._best_s).of(2)
        free = Counter({group: len(own) for group, own in self._members.items()})
        deepest = min(free.total(), len(self._costs.workload.layers))
        every = (route for depth in range(deepest, 0, -1) for route in arrangements(free, depth))
        routes = [(route, Counter(route)) for route in islice(every, _MOST_ROUTES + 1)]
        if len(routes) <= _MOST_ROUTES:
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
        if len(parts) < self._options.least_holders:
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
                bounds = search.bounds_with(SyncCost() if alone else self._least_sync)
                for _, spec in search.specs(shape, share, bounds, self._best_s):
                    self._spent += _SCHEDULE
                    timed = search.scheduler.scheduled(spec, effort=self._options.polish_effort, workers=workers)
                    if timed is not None:
                        timed = search.scheduler.loosened(timed, workers=workers, best_s=self._best_s)
                        found.append((synced_s(timed, bounds), timed))
            self._known[key] = _undominated(found)
        return [timed for least_s, timed in self._known[key] if least_s < self._best_s * (1 - ROUNDING)]

    def _workers(self, parts: Sequence[_Part]) -> list[tuple[int, ...]]:
        """Return the first workers of the groups of each pipeline that are left by those before it."""
        free = {group: iter(own) for group, own in self._members.items()}
        return [tuple(next(free[group]) for group in route) for route, _ in parts]


def _undominated(found: Sequence[tuple[float, TimedPipeline]]) -> list[tuple[float, TimedPipeline]]:
    """Return the pipelines of which none with the same cut ends sooner at every stage, those of least time first."""
    kept: list[tuple[float, TimedPipeline]] = []
    for least_s, timed in sorted(found, key=lambda own: (own[0], sum(own[1].ends_s))):
        alike = (each.ends_s for _, each in kept if each.cut_points == timed.cut_points)
        if not any(all(one <= other for one, other in zip(ends_s, timed.ends_s, strict=True)) for ends_s in alike):
            kept.append((least_s, timed))
    return kept
