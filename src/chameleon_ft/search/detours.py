"""Plans with detours: other holders of the lost workers' layers take over their micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Final

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import Plan, Route
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule._network import builder_of
from chameleon_ft.schedule.best import DEFAULT_EFFORT, best_step_s
from chameleon_ft.schedule.components import Way, components, different_ways
from chameleon_ft.schedule.heuristics import ROUNDING, ListSchedules, Problem
from chameleon_ft.schedule.list_scheduler import schedule
from chameleon_ft.search.reroute_balance import Losses, Spread, joined_hops

__all__ = ["reroute"]

# In a small plan, operations that may be scheduled to compare a spread, and in search of a better one. A plan is small
# where such a search would have so many trials.
_COMPARE: Final = 6_000
_SEARCH: Final = 8_000
_LEAST_TRIALS: Final = 25
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

    Several ways to spread them are scheduled, and the fastest is taken: either the lost hops alone go to live holders
    of their layers, so that the largest load is least, and a hop may be cut between several; or whole micro-batches go
    to other pipelines, and to new ones of workers that are left idle. In plans of up to a few hundred operations, hops
    then move and change places as long as that makes the step shorter. Good, not proven optimal; deterministic. Works
    on any plan, also one that was rerouted before. Workers that `plan` does not have are ignored.

    Args:
        plan: what was running.
        lost: ids of the lost workers.
        costs: how long operations and messages take.
        ceiling: what each worker can keep at most; pass the same to `best_program`.

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
    operations = _OPERATIONS * sum(len(route.hops) for route in plan.routes)
    is_small = operations * _LEAST_TRIALS <= _SEARCH
    spreads = _spreads(losses, cuts=(True, False) if is_small else (True,))
    if is_small:
        spreads += [_improved(spread, losses, costs, ceiling) for spread in spreads[:2]]
    plans = [_with_routes(losses, _routes(plan, spread)) for spread in spreads]
    effort = _COMPARE if is_small else DEFAULT_EFFORT
    return min(plans, key=lambda each: best_step_s(each, costs, ceiling=ceiling, effort=effort))


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


def _improved(start: Spread, losses: Losses, costs: CostModel, ceiling: Mapping[int, InFlightLimit] | None) -> Spread:
    """`start` after moves and swaps of pieces that made the step shorter, under the best rules first."""

    def hops(spread: Spread) -> list[Way]:
        return [route.hops for route in _routes(losses.plan, spread)]

    builder = builder_of(_with_routes(losses, _routes(losses.plan, start)), costs)
    tried = ListSchedules(Problem.of(builder, *different_ways(hops(start)), ceiling))
    best, step_s = start, tried.search().step_s
    operations = tried.effort
    for rules in [found.rules for found in tried.schedules]:
        improved = True
        while improved:
            improved = False
            for neighbour in _neighbours(best):
                if operations >= _SEARCH:
                    return best
                found = schedule(builder.network_of(hops(neighbour)), rules)
                operations += len(found.codes)
                if found.step_s < step_s * (1 - ROUNDING):
                    best, step_s, improved = neighbour, found.step_s, True
                    break
    return best


def _neighbours(spread: Spread) -> Iterator[Spread]:
    """Spreads that differ in the worker of one piece, or in those of two that have changed places."""
    pieces = {
        (micro_batch, index): piece
        for micro_batch, own in sorted(spread.items())
        for index, piece in enumerate(own)
        if piece.holders
    }
    for place, piece in pieces.items():
        for worker in piece.holders:
            if worker != piece.worker:
                yield _changed(spread, {place: worker})
    for (one, a), (other, b) in combinations(pieces.items(), 2):
        if a.worker != b.worker and b.worker in a.holders and a.worker in b.holders:
            yield _changed(spread, {one: b.worker, other: a.worker})


def _changed(spread: Spread, workers: Mapping[tuple[int, int], int]) -> Spread:
    """The spread with other workers for some pieces, given by their micro-batch and place."""
    changed = dict(spread)
    for (micro_batch, index), worker in workers.items():
        pieces = list(changed[micro_batch])
        pieces[index] = replace(pieces[index], worker=worker)
        changed[micro_batch] = tuple(pieces)
    return changed
