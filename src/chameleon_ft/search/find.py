"""The plan of least step time for the workers that are left, with a proof of how good it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import total_work_bound_s
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule._trials import ROUNDING
from chameleon_ft.search._arrange import fewer_hosts
from chameleon_ft.search._bounds import SyncCost
from chameleon_ft.search._choice import figures, has_two_holders, made
from chameleon_ft.search._depths import depths, of_least_time, promising
from chameleon_ft.search._effort import DEFAULT_EFFORT, is_dear, look_effort
from chameleon_ft.search._handed_in import weighed
from chameleon_ft.search._kinds import Crew, grouped
from chameleon_ft.search._mix import is_exact
from chameleon_ft.search._mixes import MixSearch, TimedMix
from chameleon_ft.search._nearby import with_better_cuts
from chameleon_ft.search._placed import (
    Candidate,
    Places,
    candidate,
    has_gradients,
    in_roles,
    polished,
    synced_s,
)
from chameleon_ft.search._placed_mix import PlacedMix, best_ways, scheduled_ways, with_best_programs, with_survivor
from chameleon_ft.search._sync import LeastSync, about, links_are_equal, numbers_of_pipelines
from chameleon_ft.search._timed import Timer
from chameleon_ft.search.front import pareto_front
from chameleon_ft.search.infeasible import why_infeasible
from chameleon_ft.search.recut import recut
from chameleon_ft.search.result import BoundFamily, FoundPlan, SearchResult

__all__ = ["find_plan"]

_ROUNDING: Final = 1e-9
_ALONE: Final = (1, 1)
# Of every search so many mixes get workers; the best plan and its alternatives are chosen among them.
_MIXES_KEPT: Final = 2
# Of the plans found, so many get the workers that hold most of them already.
_IN_ROLES: Final = 2
# Those that are nearly as good as the best of all are kept: the best programs may change their order.
_CLOSE: Final = 1.01
# Of the plans found, so many get the best programs; with little effort, so many of these get other cuts.
_POLISHED: Final = 3
_RECUT: Final = 2
# Before it is known which is the best, programs get this share of the effort.
_LITTLE: Final = 1 / 4
# With little effort: by how much longer a pipeline may take than it must.
_SLACK: Final = 5e-4
# With little effort: of how many searches of equal depth it should do for, and how many of least bound there are.
_PARTS: Final = 3
_LEAST_BOUNDS: Final = 2
# Searches are begun with those that promise most by this many times what workers take that are never idle.
_SOON: Final = 1.02
# Plans that take so many times the bound are near to it, or far from it.
_NEAR: Final = 1.01
_FAR: Final = 1.1
# Where a plan takes so many times the bound, that says little of which plans are good.
_LOOSE: Final = 1.3
# Plans that take longer than the least bounds of equal pipelines by this much are not thought of in bounds at first.
_LIKELY: Final = 1.06


def find_plan(
    costs: CostModel,
    *,
    current: Placement | None = None,
    others: Mapping[str, Plan] | None = None,
    others_ceiling: Mapping[int, InFlightLimit] | None = None,
    two_holders: bool = False,
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
        others_ceiling: what workers can keep at most under `others`, where they are going to be run with it. By default
            as much as there is memory for, and where that does not hold it, what `default_limits` says.
        two_holders: only plans in which every layer has at least two holders, so that the loss of any one worker can
            be survived; if there are none that fit, any plans. Bounds are those of all plans.
        effort: operations to schedule, about, before the search settles for what it has; None for no end. Bounds come
            on top.

    Raises:
        InfeasibleError: no pipelines fit the memory of the workers, and none of `others` does.
        PlanError: no worker is left.
        ConfigError: one of `others` has a worker that the cluster does not.
    """
    if not costs.cluster.workers:
        raise PlanError("no worker is left to plan for; start at least one")
    handed_in, too_large = weighed(others or {}, costs, current, others_ceiling)
    search = _Search(costs, current, effort, two_holders=two_holders)
    plans = search.plans()
    found: list[Candidate | FoundPlan] = sorted([*plans, *handed_in], key=figures)
    if two_holders:
        found = [each for each in found if has_two_holders(each)]
        if not found:
            return find_plan(costs, current=current, others=others, others_ceiling=others_ceiling, effort=effort)
    if not found:
        raise why_infeasible(CostModel(costs.workload, grouped(costs.cluster)))
    best, *alternatives = pareto_front(found, figures)
    return SearchResult(
        best=made(best),
        bound_s=search.bound_s,
        family=search.family,
        complete=search.complete,
        mixes=search.mixes,
        alternatives=tuple(map(made, alternatives)),
        recuts=tuple(map(made, (each for each in plans if each.name == "recut"))),
        too_large=FrozenMap(too_large),
    )


class _Search:
    """Pipelines with split and with fused backward, in any number.

    Gradient sync depends on how many pipelines there are, so there is a search for every number, or for a few that are
    alike. Their bounds together are the bound; those of least bound are run.
    """

    def __init__(
        self, costs: CostModel, current: Placement | None, effort: int | None, *, two_holders: bool = False
    ) -> None:
        self._real_costs = costs
        self._two_holders = two_holders
        cluster = grouped(costs.cluster)
        self._all_kinds = cluster == costs.cluster
        self._costs = CostModel(costs.workload, cluster)
        self._crew = Crew.of(cluster)
        self._places = Places(self._crew, self._costs)
        self._current = current
        self._effort = effort
        slack = ROUNDING if effort is None else _SLACK
        self._timers = [Timer(self._costs, self._crew, split_backward=split, slack=slack) for split in (True, False)]
        self._with_sync = has_gradients(costs) and len(cluster.workers) > 1
        self.family = BoundFamily.PIPELINES
        # Bounds are those of plans that take no longer than this, which is made to be above them.
        self._likely_s = math.inf
        self.bound_s = math.inf
        self.mixes = 0
        self.complete = not self._with_sync and links_are_equal(cluster)

    def plans(self) -> list[Candidate]:
        """The fastest plans that were found, on the front of step time and bytes to move."""
        searches = self._bounded_searches()
        placed = [*self._searched(searches), *self._of_the_fastest()]
        placed += self._of_fewer_hosts(min((each.step_s for each in placed), default=math.inf))
        placed.sort(key=lambda each: each.step_s)
        if not (self._all_kinds and is_exact(self._crew.counts) and all(search.all_shapes for search in searches)):
            self.complete = False
            self.bound_s = _bound_of_equals_s(self._real_costs)
            self.family = BoundFamily.PIPELINES_ANY_MEMORY
        # Bounds are exact but for the rounding of sums.
        self.bound_s *= 1 - _ROUNDING
        # The others are not going to be proposed.
        front = pareto_front(map(self._candidate, self._in_roles(placed)), figures)
        best = [self._polished(PlacedMix(each.pipelines, each.timer, each.step_s), 1.0) for each in front]
        return [*map(self._candidate, best), *self._recut()]

    def _candidate(self, placed: PlacedMix) -> Candidate:
        return candidate("pipelines", placed.pipelines, placed.timer, self._current)

    def _searched(self, searches: Sequence[MixSearch]) -> list[PlacedMix]:
        """What these find; where that shows that the bound is loose, also those that did not seem worth it by it.

        It may be, for one, where there is hardly memory enough to split backward.
        """
        placed = self._run(self._allowed(searches))
        split, fused = self._timers
        best_s = min((each.step_s for each in placed), default=math.inf)
        if best_s > _LOOSE * self.bound_s and all(search.timer is split for search in searches):
            placed += self._run(self._allowed(self._searches(fused)))
        return placed

    def _allowed(self, searches: Sequence[MixSearch]) -> list[MixSearch]:
        """Those that may find plans in which every layer has two holders, if all have to."""
        two = self._two_holders and len(self._crew.kinds) == 1
        return [search for search in searches if not (two and search.numbers == _ALONE)]

    def _bounded_searches(self) -> list[MixSearch]:
        """All searches that are worth it, those of least bound first."""
        split, fused = self._timers
        if self._with_sync:
            (least_s, _), *_ = [*of_least_time(depths(self._costs, [split], math.inf), 1), (math.inf, None)]
            self._likely_s = _LIKELY * least_s
        while True:
            searches = self._bounded(self._searches(split))
            if self._is_worth_it(fused):
                searches = self._bounded([*searches, *self._searches(fused)])
            if not self._likely_s < self.bound_s < math.inf:
                return searches
            self._likely_s, self.bound_s = _LIKELY * self.bound_s, math.inf

    def _is_worth_it(self, timer: Timer) -> bool:
        """Whether pipelines may take little more than the bound by now, if their gradients were reduced in no time.

        Those with fused backward mostly may not, where there is memory enough to split it.
        """
        if self._effort is None or not self._with_sync or len(self._crew.kinds) > 1:
            return True
        most = min(len(self._costs.cluster.workers), self._costs.workload.micro_batches)
        search = self._mix_search(timer, SyncCost(), numbers=(1, most))
        return search.promise(_NEAR * self.bound_s) >= self._costs.workload.micro_batches

    def _searches(self, timer: Timer) -> list[MixSearch]:
        if not self._with_sync:
            return [self._mix_search(timer, SyncCost())]
        cluster = self._costs.cluster
        alone = self._mix_search(timer, SyncCost(), numbers=_ALONE)
        least = LeastSync(self._costs, self._likely_s)
        if len(self._crew.kinds) > 1:
            return [alone, self._mix_search(timer, least.of(2))]
        most = min(len(cluster.workers), self._costs.workload.micro_batches)
        syncs = {numbers: least.of(about(numbers[0], cluster)) for numbers in numbers_of_pipelines(most)}
        return [alone, *(self._mix_search(timer, sync, numbers=numbers) for numbers, sync in syncs.items())]

    def _mix_search(self, timer: Timer, sync: SyncCost, *, numbers: tuple[int, int] | None = None) -> MixSearch:
        return MixSearch(self._costs, self._crew, timer, sync=sync, effort=self._effort, numbers=numbers)

    def _bounded(self, searches: Sequence[MixSearch]) -> list[MixSearch]:
        """The searches, those of least bound first; bounds are worked out as far as the least of all needs it."""
        soon_s = _SOON * total_work_bound_s(self._costs)
        for search in sorted(searches, key=lambda search: -search.promise(soon_s)):
            if search.reaches(self.bound_s):
                self.bound_s = min(self.bound_s, search.bound_s())
        return sorted(searches, key=lambda search: search.bound_s() if search.is_bounded else math.inf)

    def _run(self, searches: Sequence[MixSearch]) -> list[PlacedMix]:
        """What the searches find, the fastest first."""
        if self._effort is not None and self._with_sync and len(self._crew.kinds) == 1:
            # And those of least bound, which may be of few pipelines that leave workers idle.
            few = self._of_few_depths([search.timer for search in searches])
            searches = [*few, *filter(self._is_cheap, searches[:_LEAST_BOUNDS])]
        found: list[PlacedMix] = []
        best_s = math.inf
        for search in searches:
            if not search.reaches(best_s):
                continue
            # Where there is sync, the best program and the best workers may be of another mix.
            close_s = best_s * _CLOSE if self._with_sync else best_s
            searched = search.run(self.bound_s, close_s)
            self.complete = self.complete and searched.complete
            self.mixes += len(searched.mixes)
            different = {tuple((id(each), count) for each, count in mix.pipelines): mix for mix in searched.mixes}
            mixes = sorted(different.values(), key=lambda mix: mix.time_s)[:_MIXES_KEPT]
            placed: list[PlacedMix] = []
            for mix in mixes:
                if mix.time_s < close_s:
                    placed += self._placed(mix, search.timer)
                    close_s = _CLOSE * min([best_s, *(each.step_s for each in placed)])
            placed.sort(key=lambda each: each.step_s)
            found += with_survivor([each for each in placed if each.step_s < close_s], placed)
            best_s = min([best_s, *(each.step_s for each in found)])
        return self._finished(found)

    def _finished(self, found: Sequence[PlacedMix]) -> list[PlacedMix]:
        """The same, the fastest first, the best of them with better programs and cuts."""
        # The searches often come to the same.
        different = {tuple((id(each.timed), each.workers) for each in placed.pipelines): placed for placed in found}
        ordered = sorted(different.values(), key=lambda placed: placed.step_s)
        chosen = with_survivor(ordered[:_POLISHED], ordered)
        others = [placed for placed in ordered if all(placed is not each for each in chosen)]
        best = sorted((self._polished(placed, _LITTLE) for placed in chosen), key=lambda placed: placed.step_s)
        if self._effort is not None and self._with_sync:
            best[:_RECUT] = map(self._with_better_cuts, best[:_RECUT])
        if not ordered:
            return []
        first, *others = sorted([*best, *others], key=lambda placed: placed.step_s)
        return [self._polished(first, 1.0), *others]

    def _of_the_fastest(self) -> list[PlacedMix]:
        """With little effort: what the workers of the fastest kinds can do alone, while the others are idle."""
        found: list[PlacedMix] = []
        if self._effort is None or not self._with_sync:
            return found
        cluster = self._costs.cluster
        for number in range(1, len(self._crew.kinds)):
            fast = {worker for members in self._crew.members[:number] for worker in members}
            found += self._of_part(cluster.without([worker.id for worker in cluster.workers if worker.id not in fast]))
        return found

    def _of_fewer_hosts(self, best_s: float) -> list[PlacedMix]:
        """What hosts with more workers can do alone, where the best by now is far from the bound.

        One worker on a host of its own makes all rings that it is in go between hosts.
        """
        found: list[PlacedMix] = []
        cluster = self._costs.cluster
        if not self._with_sync or links_are_equal(cluster) or not _FAR * self.bound_s < best_s < math.inf:
            return found
        for hosts in fewer_hosts(cluster):
            part = cluster.without([worker.id for worker in cluster.workers if worker.host not in hosts])
            if total_work_bound_s(CostModel(self._costs.workload, part)) < best_s:
                found += self._of_part(part)
                best_s = min([best_s, *(each.step_s for each in found)])
        return found

    def _of_part(self, part: Cluster) -> list[PlacedMix]:
        """What some of the workers can do, while the others are idle."""
        search = _Search(CostModel(self._costs.workload, part), None, self._effort, two_holders=self._two_holders)
        return search._searched(search._bounded_searches())

    def _is_cheap(self, search: MixSearch) -> bool:
        """Whether a look at the pipelines that make up its bound does not cost too much."""
        mix = search.bound_mix() if search.is_bounded else []
        return bool(mix) and not any(is_dear(len(share.shape), share.micro_batches, self._effort) for share in mix)

    def _of_few_depths(self, timers: Iterable[Timer]) -> list[MixSearch]:
        """Searches of pipelines of about equal depth, which promises that many gradients are reduced together."""
        timers = list({id(timer): timer for timer in timers}.values())
        every = depths(self._costs, timers, self._likely_s)
        few = [
            MixSearch(
                self._costs,
                self._crew,
                each.timer,
                sync=each.sync,
                effort=(self._effort or 0) // _PARTS,
                numbers=each.numbers,
            )
            for each in promising(every, effort=self._effort, fewest=2 if self._two_holders else 1)
        ]
        # Where all are dear, there is nothing for it.
        return few or [self._mix_search(timer, SyncCost()) for timer in timers]

    def _placed(self, mix: TimedMix, timer: Timer) -> list[PlacedMix]:
        """On workers that are chosen by what sync takes: how long the pipelines take does not depend on it much.

        Where that would not survive the loss of some host, and another way to place them would, on these as well.
        """
        timed = [each for each, count in mix.pipelines for _ in range(count)]
        ways = self._places.ways([each.shape for each in timed], [each.stops for each in timed])
        if self._effort is None:
            return scheduled_ways(timed, ways, timer, effort=look_effort(self._effort))
        return best_ways(timed, ways, timer)

    def _in_roles(self, placed: Sequence[PlacedMix]) -> list[PlacedMix]:
        """The best ones as they are, and with stages on the workers that hold most of them."""
        few = with_survivor(placed[:_IN_ROLES], placed)
        if self._current is None:
            return with_survivor(few[:1], few)
        found: list[PlacedMix] = []
        for each in few:
            for keep_hosts in (True, False):
                pipelines = in_roles(
                    each.pipelines, each.timer, self._current, keep_hosts=keep_hosts, effort=self._share(_LITTLE)
                )
                found.append(PlacedMix(pipelines, each.timer, step_s=synced_s(pipelines, each.timer)))
                if links_are_equal(self._costs.cluster):
                    break
        return found

    def _recut(self) -> Iterator[Candidate]:
        """With the whole pipelines of the current placement as they are, with split and with fused backward."""
        if self._current is None:
            return
        split, fused = self._timers
        for timer in [split, fused] if self._is_worth_it(fused) else [split]:
            pipelines = recut(self._current, timer, effort=look_effort(self._effort))
            if pipelines is not None:
                yield candidate("recut", polished(pipelines, timer, self._effort), timer, self._current)

    def _with_better_cuts(self, placed: PlacedMix) -> PlacedMix:
        better = with_better_cuts(placed.pipelines, placed.timer, effort=look_effort(self._effort))
        return self._polished(replace(placed, pipelines=better), _LITTLE) if better != placed.pipelines else placed

    def _polished(self, placed: PlacedMix, share: float) -> PlacedMix:
        return with_best_programs(placed, self._share(share))

    def _share(self, share: float) -> int | None:
        return None if self._effort is None else int(self._effort * share)


def _bound_of_equals_s(costs: CostModel) -> float:
    """A bound on all pipelines if every worker were as fast as the fastest, and whatever memory they need."""
    speed = max(worker.speed for worker in costs.cluster.workers)
    workers = tuple(replace(worker, speed=speed, memory_bytes=None) for worker in costs.cluster.workers)
    cluster = Cluster(workers, costs.cluster.intra_host, costs.cluster.inter_host)
    equals = _Search(CostModel(costs.workload, cluster), None, 0)
    equals._bounded_searches()
    return max(equals.bound_s, total_work_bound_s(costs))
