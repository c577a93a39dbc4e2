"""The plan of least step time for the workers that are left, with a proof of how good it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Protocol, TypeVar

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import cluster_bound_s, estimate_step, program_memory, state_bytes
from chameleon_ft.plan import LayerRange, Placement, Plan, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, best_program, default_limits
from chameleon_ft.search._arrange import by_pipeline, by_stage
from chameleon_ft.search._conditions import SyncCost
from chameleon_ft.search._kinds import Crew, grouped
from chameleon_ft.search._mixes import MixSearch, TimedMix
from chameleon_ft.search._sync import PlacedPipeline, assumed_sync, largest_host, least_sync, synced_s
from chameleon_ft.search._timed import TimedPipeline, hops_of
from chameleon_ft.search.infeasible import why_infeasible
from chameleon_ft.search.result import BoundFamily, FoundPlan, SearchResult

__all__ = ["DEFAULT_EFFORT", "find_plan"]

DEFAULT_EFFORT: Final = 2_000
"""Operations that a search schedules before it stops looking for something better; some tens of milliseconds."""

_ROUNDING: Final = 1e-9
# Of every search so many mixes get workers; the best plan and its alternatives are chosen among them.
_MIXES_KEPT: Final = 2
# Of all mixes so many get the best programs, which may change their order.
_POLISHED: Final = 2


def find_plan(
    costs: CostModel,
    *,
    current: Placement | None = None,
    others: Mapping[str, Plan] | None = None,
    effort: int | None = DEFAULT_EFFORT,
) -> SearchResult:
    """The fastest plan that is found for the workers of `costs.cluster`: pipelines side by side, or one of `others`.

    Pipelines may have any depths, cuts and shares of the micro-batches; workers may stay idle. With `effort` None the
    search goes on until nothing of that kind can be faster (see `SearchResult.complete`), which may take for ever on
    large instances. Deterministic.

    Args:
        costs: what is to be computed, and who is left.
        current: which layers the live workers hold now; None if nothing is held yet, so that everything has to move.
        others: plans to compare with, by name, such as a rerouted one.
        effort: operations to schedule, at most, before the search settles for what it has; None for no end.

    Raises:
        InfeasibleError: no pipelines fit the memory of the workers, and none of `others` does.
        PlanError: no worker is left.
        ConfigError: one of `others` has a worker that the cluster does not.
    """
    if not costs.cluster.workers:
        raise PlanError("no worker is left to plan for; start at least one")
    handed_in, too_large = _weighed(others or {}, costs, current)
    search = _Search(costs, current, effort)
    found = sorted([*search.plans(), *handed_in], key=lambda each: (each.step_s, each.least_moved_bytes))
    if not found:
        raise why_infeasible(CostModel(costs.workload, grouped(costs.cluster)))
    return SearchResult(
        best=found[0],
        bound_s=search.bound_s,
        family=search.family,
        complete=search.complete,
        mixes=search.mixes,
        alternatives=tuple(_front(found)[1:]),
        too_large=FrozenMap(too_large),
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A mix on real workers, with the search that its pipelines come from."""

    pipelines: tuple[PlacedPipeline, ...]
    search: MixSearch
    step_s: float
    least_moved_bytes: int


class _Search:
    """Pipelines with split and with fused backward, the more promising first."""

    def __init__(self, costs: CostModel, current: Placement | None, effort: int | None) -> None:
        self._real_costs = costs
        cluster = grouped(costs.cluster)
        self._all_kinds = cluster == costs.cluster
        self._costs = CostModel(costs.workload, cluster)
        self._crew = Crew.of(cluster)
        self._current = current
        self._effort = effort
        self._least = least_sync(costs)
        self._with_sync = self._least != SyncCost()
        self.family = BoundFamily.PIPELINES
        self.bound_s = 0.0
        self.mixes = 0
        self.complete = False

    def plans(self) -> list[FoundPlan]:
        """The fastest plans that were found, on the front of step time and bytes to move."""
        split, fused = (self._mix_search(split, self._least) for split in (True, False))
        self._bound(split, fused)
        placed = [self._placed(mix, search) for mix, search in self._mixes(split, fused)]
        placed.sort(key=lambda each: each.step_s)
        front = _front([*map(self._polished, placed[:_POLISHED]), *placed[_POLISHED:]])
        if not (self._all_kinds and split.all_shapes):
            self.complete = False
            self.bound_s = min(cluster_bound_s(self._real_costs, split_backward=split) for split in (True, False))
            self.family = BoundFamily.PIPELINES_ANY_MEMORY
        # Bounds are exact but for the rounding of sums.
        self.bound_s *= 1 - _ROUNDING
        return list(map(self._built, front))

    def _bound(self, split: MixSearch, fused: MixSearch) -> None:
        self.bound_s = self._least_s(split)
        if fused.reaches(self.bound_s) or self._least_alone_s(fused, self.bound_s) < self.bound_s:
            self.bound_s = min(self.bound_s, self._least_s(fused))

    def _mixes(self, split: MixSearch, fused: MixSearch) -> list[tuple[TimedMix, MixSearch]]:
        """The fastest mixes of every search, split backward first: it is hardly ever slower."""
        best_s = math.inf
        self.complete = not self._with_sync and _links_are_equal(self._costs.cluster)
        found: list[tuple[TimedMix, MixSearch]] = []
        for bounding in (split, fused):
            if not bounding.reaches(best_s):
                continue
            for search in self._searches(bounding):
                from_s = self.bound_s if search is bounding else search.bound_s()
                if from_s == math.inf:
                    continue
                searched = search.run(from_s, best_s)
                self.complete = self.complete and searched.complete
                self.mixes += len(searched.mixes)
                found += [(mix, search) for mix in sorted(searched.mixes, key=lambda mix: mix.time_s)[:_MIXES_KEPT]]
            best_s = min([best_s, *(mix.time_s for mix, _ in found)])
        return found

    def _least_moved_bytes(self, pipelines: int) -> int:
        return _least_moved_bytes([pipelines] * len(self._costs.workload.layers), self._costs, self._current)

    def _mix_search(self, split_backward: bool, sync: SyncCost, *, least_depth: int = 1) -> MixSearch:
        return MixSearch(
            self._costs,
            self._crew,
            split_backward=split_backward,
            sync=sync,
            effort=self._effort,
            least_depth=least_depth,
        )

    def _least_s(self, search: MixSearch) -> float:
        """A bound on all mixes: on those of several pipelines, and on one pipeline, which has no gradient sync."""
        several_s = search.bound_s()
        return self._least_alone_s(search, several_s) if self._with_sync else several_s

    def _least_alone_s(self, search: MixSearch, enough_s: float) -> float:
        """A bound on one pipeline that does everything, or `enough_s` if that is less."""
        alone = self._mix_search(search.cuts.split_backward, SyncCost()) if self._with_sync else search
        return alone.single_bound_s(enough_s)

    def _searches(self, bounding: MixSearch) -> Iterator[MixSearch]:
        """The searches to run: for the least program, and with the gradient sync of the bound's mix."""
        if not self._with_sync:
            yield bounding
            return
        pipelines = sum(share.count for share in bounding.bound_mix())
        split = bounding.cuts.split_backward
        cluster = self._costs.cluster
        room = largest_host(cluster)
        yield self._mix_search(split, SyncCost())
        yield self._mix_search(split, assumed_sync(self._costs, pipelines, across_hosts=room < len(cluster.workers)))
        # So few pipelines that the holders of a layer fit on one host.
        depth = math.ceil(len(cluster.workers) / room)
        if 1 < depth <= len(self._costs.workload.layers):
            yield self._mix_search(split, assumed_sync(self._costs, room, across_hosts=False), least_depth=depth)

    def _placed(self, mix: TimedMix, search: MixSearch) -> _Placed:
        timed = [each for each, count in mix.pipelines for _ in range(count)]
        shapes = [each.shape for each in timed]
        ways = [by_pipeline(shapes, self._crew, self._costs.cluster)]
        if self._with_sync and len(timed) > 1:
            ways.append(by_stage(shapes, [each.stops for each in timed], self._crew))
        return min((self._on(workers, timed, search) for workers in ways), key=lambda placed: placed.step_s)

    def _on(self, workers: Sequence[tuple[int, ...]], timed: Sequence[TimedPipeline], search: MixSearch) -> _Placed:
        best = self._effort is None
        pipelines = tuple(
            PlacedPipeline(search.timer.timed(own, each.shape, each.stops, each.micro_batches, best=best), own)
            for each, own in zip(timed, workers, strict=True)
        )
        return _Placed(
            pipelines,
            search,
            step_s=synced_s(pipelines, self._costs),
            least_moved_bytes=self._least_moved_bytes(len(pipelines)),
        )

    def _polished(self, placed: _Placed) -> _Placed:
        """The same with the best program for every pipeline that would end last otherwise."""
        programs = {id(each.timed): each for each in placed.pipelines}
        best: dict[int, TimedPipeline] = {}
        last_s = 0.0
        for key, each in sorted(programs.items(), key=lambda item: -item[1].timed.program_s):
            if each.timed.program_s <= last_s:
                break
            own = each.timed
            best[key] = placed.search.timer.timed(each.workers, own.shape, own.stops, own.micro_batches, best=True)
            last_s = max(last_s, best[key].program_s)
        pipelines = tuple(
            PlacedPipeline(best.get(id(each.timed), each.timed), each.workers) for each in placed.pipelines
        )
        step_s = synced_s(pipelines, self._costs)
        return replace(placed, pipelines=pipelines, step_s=step_s) if step_s < placed.step_s else placed

    def _built(self, placed: _Placed) -> FoundPlan:
        held: dict[int, tuple[LayerRange, ...]] = {}
        routes: list[Route] = []
        ceiling: dict[int, InFlightLimit] = {}
        cuts = placed.search.cuts
        for _, same in groupby(placed.pipelines, key=lambda each: id(each.timed)):
            pipelines = list(same)
            timed = pipelines[0].timed
            limits = cuts.limits(timed.shape, timed.stops, timed.micro_batches)
            for pipeline in pipelines:
                hops = hops_of(pipeline.workers, timed.stops)
                held.update((hop.worker, (hop.layers,)) for hop in hops)
                ceiling.update(zip(pipeline.workers, limits, strict=True))
                first = len(routes)
                routes += [Route(number, hops) for number in range(first, first + timed.micro_batches)]
        workload = self._costs.workload
        timed_once = {id(each.timed): each.timed for each in placed.pipelines}.values()
        return FoundPlan(
            name="pipelines",
            plan=Plan(Placement(len(workload.layers), held), tuple(routes), cuts.split_backward),
            ceiling=FrozenMap(ceiling),
            step_s=placed.step_s,
            program_s=max(timed.program_s for timed in timed_once),
            peak_bytes=max(
                memory.peak_bytes
                for timed in timed_once
                for memory in program_memory(timed.program, timed.plan.placement, workload).values()
            ),
            least_moved_bytes=placed.least_moved_bytes,
        )


def _weighed(
    others: Mapping[str, Plan], costs: CostModel, current: Placement | None
) -> tuple[list[FoundPlan], dict[str, int]]:
    """The plans handed in, and the bytes that are missing where one does not fit even with the fewest in flight."""
    found: list[FoundPlan] = []
    too_large: dict[str, int] = {}
    for name, plan in others.items():
        ceilings: tuple[Mapping[int, InFlightLimit] | None, ...] = (None, default_limits(plan))
        for ceiling in ceilings:
            estimate = estimate_step(plan, best_program(plan, costs, ceiling=ceiling).program, costs)
            missing = estimate.over_capacity(costs)
            if not missing:
                holders = [len(plan.placement.holders(layer)) for layer in range(plan.placement.num_layers)]
                found.append(
                    FoundPlan(
                        name=name,
                        plan=plan,
                        ceiling=FrozenMap(ceiling or {}),
                        step_s=estimate.step_s,
                        program_s=estimate.program_s,
                        peak_bytes=max(memory.peak_bytes for memory in estimate.memory.values()),
                        least_moved_bytes=_least_moved_bytes(holders, costs, current),
                    )
                )
                break
            too_large[name] = max(missing.values())
    return found, {name: missing for name, missing in too_large.items() if name not in {each.name for each in found}}


def _least_moved_bytes(holders: Sequence[int], costs: CostModel, current: Placement | None) -> int:
    """Of the holders that each layer gets, those that there are more of than live workers that hold it now."""
    live = {worker.id for worker in costs.cluster.workers}
    total = 0
    for index, (layer, wanted) in enumerate(zip(costs.workload.layers, holders, strict=True)):
        have = 0 if current is None else len(live.intersection(current.holders(index)))
        total += max(0, wanted - have) * state_bytes(layer)
    return total


def _links_are_equal(cluster: Cluster) -> bool:
    hosts = len({worker.host for worker in cluster.workers})
    return cluster.intra_host == cluster.inter_host or hosts in (1, len(cluster.workers))


class _Weighable(Protocol):
    @property
    def step_s(self) -> float: ...

    @property
    def least_moved_bytes(self) -> int: ...


_W = TypeVar("_W", bound=_Weighable)


def _front(plans: Sequence[_W]) -> list[_W]:
    """Those that no other beats in both step time and bytes to move, the fastest first."""
    front: list[_W] = []
    for each in sorted(plans, key=lambda each: (each.step_s, each.least_moved_bytes)):
        if not front or each.least_moved_bytes < front[-1].least_moved_bytes:
            front.append(each)
    return front
