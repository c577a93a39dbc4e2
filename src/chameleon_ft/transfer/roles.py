"""Roles: which live worker takes which place of a new placement, so that the fewest bytes move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, Placement, Plan, Route
from chameleon_ft.schedule.components import different_ways
from chameleon_ft.transfer._assignment import Balanced
from chameleon_ft.transfer.holdings import Holding, groups_of, lacking_bytes
from chameleon_ft.workload import LayerCost

__all__ = ["assign_roles", "least_moved_bytes", "remap_placement", "remap_plan"]

# Holdings, each with the workers or places that have it.
_Groups = list[tuple[Holding, list[int]]]


def assign_roles(
    workers: Mapping[int, Holding], places: Mapping[int, Holding], layers: Sequence[LayerCost]
) -> dict[int, int]:
    """Return the worker that takes each place, of the workers of the place's kind.

    First, the bytes that workers lack in total are least; of such assignments, the largest receive of a worker of each
    kind is least; of those, most workers keep exactly the layers that they hold. All three are exact. Ties go by
    number: a worker takes the place of its own number if it can, else the lowest numbers meet.

    Args:
        workers: what each live worker holds.
        places: what each place is to hold, by the number that the new placement gives its worker.
        layers: costs of all layers.

    Returns:
        place -> worker, ascending; workers that are not in it become idle.

    Raises:
        PlanError: there are fewer workers of a kind than places for them, or a range goes past the last layer.
    """
    roles: dict[int, int] = {}
    for mine, theirs in _by_kind(workers, places):
        keeps = [[one.ranges == other.ranges for other, _ in theirs] + [False] for one, _ in mine]
        flow = _problem(mine, theirs, layers).fair_flow(keeps).tolist()
        roles.update(_by_number([group for _, group in mine], [group for _, group in theirs], flow))
    return dict(sorted(roles.items()))


def least_moved_bytes(
    workers: Mapping[int, Holding], places: Mapping[int, Holding], layers: Sequence[LayerCost]
) -> int:
    """Return the bytes that workers lack for their places in total under the roles of `assign_roles`."""
    problems = (_problem(mine, theirs, layers) for mine, theirs in _by_kind(workers, places))
    return sum(int((problem.cost * problem.least_cost_flow()).sum()) for problem in problems)


def remap_placement(placement: Placement, roles: Mapping[int, int]) -> Placement:
    """Return the placement with each worker replaced by the one that takes its place (place -> worker)."""
    if _is_kept(placement, roles):
        return placement
    return Placement(placement.num_layers, {roles[place]: ranges for place, ranges in placement.ranges.items()})


def remap_plan(plan: Plan, roles: Mapping[int, int]) -> Plan:
    """Return the plan with each worker replaced throughout by the one that takes its place (place -> worker)."""
    if _is_kept(plan.placement, roles):
        return plan
    ways, way_of = different_ways(route.hops for route in plan.routes)
    remapped = [tuple(Hop(roles[hop.worker], hop.layers) for hop in hops) for hops in ways]
    return replace(
        plan,
        placement=remap_placement(plan.placement, roles),
        routes=tuple(Route(micro_batch, remapped[way]) for micro_batch, way in enumerate(way_of)),
        recompute={roles[worker]: layers for worker, layers in plan.recompute.items()},
        fused_workers=frozenset(map(roles.__getitem__, plan.fused_workers)),
    )


def _is_kept(placement: Placement, roles: Mapping[int, int]) -> bool:
    """Whether every worker keeps its place."""
    return all(roles[place] == place for place in placement.ranges)


def _by_kind(workers: Mapping[int, Holding], places: Mapping[int, Holding]) -> list[tuple[_Groups, _Groups]]:
    """The workers and the places of each kind that has places, by what they hold."""
    mine: dict[Hashable, _Groups] = defaultdict(list)
    theirs: dict[Hashable, _Groups] = defaultdict(list)
    for found, holdings in ((mine, workers), (theirs, places)):
        for group in groups_of(holdings):
            found[group[0].kind].append(group)
    return [(mine[kind], wanted) for kind, wanted in theirs.items()]


def _problem(mine: _Groups, theirs: _Groups, layers: Sequence[LayerCost]) -> Balanced:
    """Workers to places of one kind, with one more demand, without cost, for the workers that become idle."""
    cost = lacking_bytes([each for each, _ in mine], [each for each, _ in theirs], layers)
    supply, demand = [len(group) for _, group in mine], [len(group) for _, group in theirs]
    idle = sum(supply) - sum(demand)
    if idle < 0:
        raise PlanError(
            f"{sum(demand)} places need as many live workers of their kind, but there are {sum(supply)}; "
            "plan for the live workers, or take more workers for the same kind"
        )
    padded = np.zeros((len(mine), len(theirs) + 1), dtype=np.int64)
    padded[:, :-1] = cost
    return Balanced(padded, np.array(supply, dtype=np.int64), np.array([*demand, idle], dtype=np.int64))


def _by_number(
    workers: Sequence[Sequence[int]], places: Sequence[Sequence[int]], flow: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Place -> worker, with `flow[i][j]` of the workers i for places j; equal numbers meet first."""
    roles: dict[int, int] = {}
    taken: set[int] = set()
    left: list[tuple[int, int, int]] = []
    for i, group in enumerate(workers):
        members = set(group)
        for j, slots in enumerate(places):
            if flow[i][j]:
                alike = [place for place in slots if place in members][: flow[i][j]]
                roles.update(zip(alike, alike, strict=True))
                taken.update(alike)
                left.append((i, j, flow[i][j] - len(alike)))
    free = [iter([worker for worker in group if worker not in taken]) for group in workers]
    open_places = [iter([place for place in slots if place not in roles]) for slots in places]
    for i, j, count in left:
        roles.update((next(open_places[j]), next(free[i])) for _ in range(count))
    return roles
