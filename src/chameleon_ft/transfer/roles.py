"""Roles: which live worker takes which place of a new placement, so that the fewest bytes move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule.records import Integers, distinct_paths
from chameleon_ft.transfer._assignment import Balanced
from chameleon_ft.workload import LayerCost


@dataclass(frozen=True, slots=True)
class Holding:
    """The layers of a worker now, or of a place of a new placement.

    Attributes:
        ranges: the layers, as a `Placement` keeps them; empty for a worker that holds none.
        kind: kind of the worker; a place goes to a worker of an equal kind only, and those are interchangeable.
    """

    ranges: tuple[LayerRange, ...]
    kind: Hashable = None


# Holdings, each with the workers or places that have it.
_Groups = list[tuple[Holding, list[int]]]


def worker_kinds(cluster: Cluster) -> dict[int, Hashable]:
    """Return each worker's kind, where only its speed and its memory count."""
    return {worker.id: (worker.speed, worker.memory_bytes) for worker in cluster.workers}


def holdings_of(placement: Placement | None, kinds: Mapping[int, Hashable]) -> dict[int, Holding]:
    """Return what each worker of `kinds` holds in `placement`, or nothing if that is None; ascending by worker."""
    ranges = {} if placement is None else placement.ranges
    return {worker: Holding(ranges.get(worker, ()), kinds[worker]) for worker in sorted(kinds)}


def groups_of(holdings: Mapping[int, Holding]) -> list[tuple[Holding, list[int]]]:
    """Group workers (or places) by what they hold, each group in the order of `holdings`."""
    # Plain numbers as keys, because ranges of layers are slow to hash.
    groups: dict[Hashable, tuple[Holding, list[int]]] = {}
    for worker, holding in holdings.items():
        key = holding.kind, *[end for layers in holding.ranges for end in (layers.start, layers.stop)]
        groups.setdefault(key, (holding, []))[1].append(worker)
    return list(groups.values())


def moved_bytes(current: Placement | None, new: Placement, layers: Sequence[LayerCost]) -> int:
    """Return the bytes of state that the workers of `new` lack for it, if each keeps its place."""
    before = list(accumulate((state_bytes(layer) for layer in layers), initial=0))
    held = {} if current is None else current.ranges
    return sum(missing_between(held.get(worker, ()), ranges, before) for worker, ranges in new.ranges.items())


def missing_between(had: Sequence[LayerRange], wanted: Sequence[LayerRange], before: Sequence[int]) -> int:
    """Return the sum over the layers of `wanted` that are not in `had`; `before[i]` is that of all before layer i.

    Both are as a `Placement` keeps them: no two ranges of one overlap.
    """
    found = 0
    for layers in wanted:
        found += before[layers.stop] - before[layers.start]
        for own in had:
            start, stop = max(layers.start, own.start), min(layers.stop, own.stop)
            if start < stop:
                found -= before[stop] - before[start]
    return found


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


def min_moved_bytes(workers: Mapping[int, Holding], places: Mapping[int, Holding], layers: Sequence[LayerCost]) -> int:
    """Return the bytes that workers lack for their places in total under the roles of `assign_roles`."""
    problems = (_problem(mine, theirs, layers) for mine, theirs in _by_kind(workers, places))
    return sum(int((problem.cost * problem.min_cost_flow()).sum()) for problem in problems)


def remap_placement(placement: Placement, roles: Mapping[int, int]) -> Placement:
    """Return the placement with each worker replaced by the one that takes its place (place -> worker)."""
    if _is_kept(placement, roles):
        return placement
    return Placement(placement.num_layers, {roles[place]: ranges for place, ranges in placement.ranges.items()})


def remap_plan(plan: Plan, roles: Mapping[int, int]) -> Plan:
    """Return the plan with each worker replaced throughout by the one that takes its place (place -> worker)."""
    if _is_kept(plan.placement, roles):
        return plan
    paths, path_of = distinct_paths(route.hops for route in plan.routes)
    remapped = [tuple(Hop(roles[hop.worker], hop.layers) for hop in hops) for hops in paths]
    return replace(
        plan,
        placement=remap_placement(plan.placement, roles),
        routes=tuple(Route(micro_batch, remapped[path]) for micro_batch, path in enumerate(path_of)),
        recompute={roles[worker]: layers for worker, layers in plan.recompute.items()},
        fused_workers=frozenset(map(roles.__getitem__, plan.fused_workers)),
    )


def _is_kept(placement: Placement, roles: Mapping[int, int]) -> bool:
    """Return whether every worker keeps its place."""
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
    cost = _lacking_bytes([each for each, _ in mine], [each for each, _ in theirs], layers)
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


def _lacking_bytes(have: Sequence[Holding], wanted: Sequence[Holding], layers: Sequence[LayerCost]) -> Integers:
    """Return the bytes of state that a worker with `have[i]` lacks for `wanted[j]`, whatever their kinds.

    int64 [len(have), len(wanted)]. Raises PlanError when a range goes past the last of `layers`.
    """
    for holding in chain(have, wanted):
        if holding.ranges and holding.ranges[-1].stop > len(layers):
            raise PlanError(f"layers {holding.ranges[-1]} go past the {len(layers)} layers of the workload")
    num_bytes = np.array([state_bytes(layer) for layer in layers], dtype=np.int64)
    return (1 - _incidence(have, len(layers))) @ (_incidence(wanted, len(layers)) * num_bytes).T


def _incidence(holdings: Sequence[Holding], num_layers: int) -> Integers:
    """1 where holding i has layer j; int64 [holdings, layers]."""
    found = np.zeros((len(holdings), num_layers), dtype=np.int64)
    for row, holding in zip(found, holdings, strict=True):
        for layers in holding.ranges:
            row[layers.start : layers.stop] = 1
    return found


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
