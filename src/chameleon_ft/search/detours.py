"""Plans with detours: the lost workers' share of the micro-batches goes to the other holders of their layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import Hop, Plan, Route
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule._network import builder_of
from chameleon_ft.schedule.best import best_step_s, listed_step_s
from chameleon_ft.schedule.components import components, different_ways
from chameleon_ft.schedule.heuristics import ROUNDING, ListSchedules, Problem
from chameleon_ft.schedule.list_scheduler import schedule
from chameleon_ft.search.reroute_balance import Losses, Piece, Spread, joined_hops

__all__ = ["reroute"]

# Operations that may be scheduled: of the first spread that is looked at; of each in a small plan, where programs are
# compared; and in search of a better spread. A plan is small where such a search would have so many trials.
_COMPARE: Final = 600
_COMPARE_BY_SEARCH: Final = 6_000
_SEARCH: Final = 8_000
_LEAST_TRIALS: Final = 25
# List schedules of another spread, unless one is better than what there is.
_TRIALS: Final = 3
# F, and B or I and W.
_OPERATIONS: Final = 3


def reroute(
    plan: Plan,
    lost: Collection[int],
    costs: CostModel,
    *,
    ceiling: Mapping[int, InFlightLimit] | None = None,
) -> Plan:
    """The plan without the lost workers: same placement otherwise, and only micro-batches that have lost one move.

    They are spread in several ways, and that with the fastest list schedules is taken. Either the lost hops alone go to
    live holders of their layers, shared out so that the one with most to do has as little as can be: a hop may be cut
    between several. Or whole micro-batches go to other pipelines, and to new ones of workers that are left idle. In
    plans of up to a few hundred operations, hops then move and change places as long as that makes the step shorter.
    So it is good, not proven optimal. Works on any plan, also one that was rerouted before, or with pipelines of
    different depths. Deterministic. Workers that `plan` does not have are ignored.

    Args:
        plan: what was running.
        lost: the workers that are gone.
        costs: how long operations and messages take.
        ceiling: what each worker can keep at most; the same that `best_program` is going to get.

    Raises:
        NoHolderError: layers whose last holder is lost.
        PlanError: the workload has another number of layers than the plan.
    """
    placement = plan.placement.without(lost)
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    losses = Losses(plan, placement, costs)
    if not losses.broken:
        return _with_routes(losses, plan.routes)
    small = _OPERATIONS * sum(len(route.hops) for route in plan.routes) * _LEAST_TRIALS <= _SEARCH
    spreads = _spreads(losses, cuts=(True, False) if small else (True,))
    scheduled = _Scheduled(losses, None if small else spreads, costs, ceiling)
    if small:
        spreads += [scheduled.improved(spread) for spread in spreads[:2]]
        best = min(spreads, key=scheduled.searched_s)
    else:
        best = scheduled.fastest(spreads)
    return _with_routes(losses, _routes(plan, best))


def _spreads(losses: Losses, *, cuts: Iterable[bool]) -> list[Spread]:
    """Different spreads; the first is usually the fastest. `cuts` are the values of `cut` to look at."""
    wholes = (True, False) if losses.parts(whole_holders=True) != losses.parts(whole_holders=False) else (True,)
    spreads = [losses.detoured(cut=cut, whole_holders=whole) for cut in cuts for whole in wholes]
    if (moved := losses.moved()) is not None:
        spreads.append(moved)
    return [spread for number, spread in enumerate(spreads) if spread not in spreads[:number]]


def _with_routes(losses: Losses, routes: tuple[Route, ...]) -> Plan:
    placement = losses.placement
    recompute = {worker: own for worker, own in losses.plan.recompute.items() if worker in placement.ranges}
    # All pipelines that detours join split their backward if one of them does.
    fused = losses.plan.fused_workers
    joined = (own.workers for own in components(routes) if not fused.issuperset(own.workers)) if fused else ()
    fused = fused.intersection(placement.ranges).difference(*joined)
    return Plan(placement, routes, losses.plan.split_backward, recompute, fused)


def _routes(plan: Plan, spread: Spread) -> tuple[Route, ...]:
    return tuple(
        Route(route.micro_batch, joined_hops(spread[route.micro_batch])) if route.micro_batch in spread else route
        for route in plan.routes
    )


class _Scheduled:
    """Schedules of a plan with different spreads: of all of it, or of the parts that some of `spreads` touches."""

    def __init__(
        self,
        losses: Losses,
        spreads: Iterable[Spread] | None,
        costs: CostModel,
        ceiling: Mapping[int, InFlightLimit] | None,
    ) -> None:
        self._losses = losses
        self._costs = costs
        self._ceiling = ceiling
        broken = frozenset(losses.broken)
        self._staying = [route for route in losses.plan.routes if route.micro_batch not in broken]
        if spreads is not None:
            workers = {piece.worker for spread in spreads for pieces in spread.values() for piece in pieces}
            touched = [own for own in components(self._staying) if not workers.isdisjoint(own.workers)]
            self._staying = [route for own in touched for route in own.routes]

    def fastest(self, spreads: Sequence[Spread]) -> Spread:
        """The one with the shortest list schedules, of a few for each; of equals the last."""
        # From the last on: it is quickly scheduled, and says when the others are short enough.
        best = spreads[-1]
        best_s = listed_step_s(self._plan(best), self._costs, ceiling=self._ceiling, effort=_COMPARE)
        for spread in reversed(spreads[:-1]):
            plan = self._plan(spread)
            most = _TRIALS * _OPERATIONS * sum(len(route.hops) for route in plan.routes)
            enough_s = best_s * (1 - ROUNDING)
            step_s = listed_step_s(plan, self._costs, ceiling=self._ceiling, effort=most, enough_s=enough_s)
            if step_s <= enough_s:
                best, best_s = spread, step_s
        return best

    def searched_s(self, spread: Spread) -> float:
        """Seconds of the best program that a small search finds."""
        return best_step_s(self._plan(spread), self._costs, ceiling=self._ceiling, effort=_COMPARE_BY_SEARCH)

    def improved(self, start: Spread) -> Spread:
        """`start` after moves and swaps of pieces that made the step shorter, under the best rules first."""
        builder = builder_of(self._plan(start), self._costs)
        tried = ListSchedules(Problem.of(builder, *different_ways(self._hops(start)), self._ceiling))
        best, step_s = start, tried.search().step_s
        operations = tried.effort
        for rules in [found.rules for found in tried.schedules]:
            improved = True
            while improved:
                improved = False
                for neighbour in _neighbours(best):
                    if operations >= _SEARCH:
                        return best
                    found = schedule(builder.network_of(self._hops(neighbour)), rules)
                    operations += len(found.codes)
                    if found.step_s < step_s * (1 - ROUNDING):
                        best, step_s, improved = neighbour, found.step_s, True
                        break
        return best

    def _hops(self, spread: Spread) -> list[tuple[Hop, ...]]:
        hops = {route.micro_batch: route.hops for route in self._staying}
        hops.update((micro_batch, joined_hops(pieces)) for micro_batch, pieces in spread.items())
        return [hops[micro_batch] for micro_batch in sorted(hops)]

    def _plan(self, spread: Spread) -> Plan:
        return _with_routes(self._losses, tuple(Route(*route) for route in enumerate(self._hops(spread))))


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece by where it is in a spread."""

    micro_batch: int
    index: int
    piece: Piece


def _neighbours(spread: Spread) -> Iterator[Spread]:
    """Spreads that differ in the worker of one piece, or in those of two that have changed places."""
    places = [
        _Place(micro_batch, index, piece)
        for micro_batch, pieces in sorted(spread.items())
        for index, piece in enumerate(pieces)
        if piece.holders
    ]
    for place in places:
        for worker in place.piece.holders:
            if worker != place.piece.worker:
                yield _changed(spread, (place, worker))
    for number, one in enumerate(places):
        for other in places[number + 1 :]:
            a, b = one.piece, other.piece
            if a.worker != b.worker and b.worker in a.holders and a.worker in b.holders:
                yield _changed(spread, (one, b.worker), (other, a.worker))


def _changed(spread: Spread, *changes: tuple[_Place, int]) -> Spread:
    changed = dict(spread)
    for place, worker in changes:
        pieces = list(changed[place.micro_batch])
        pieces[place.index] = Piece(place.piece.layers, worker, place.piece.holders)
        changed[place.micro_batch] = tuple(pieces)
    return changed
