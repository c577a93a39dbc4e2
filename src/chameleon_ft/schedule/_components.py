"""The parts of a plan that have nothing to do with each other during a step: workers that are joined by routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chameleon_ft.plan.plan import Hop, Route

Way = tuple[Hop, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Workers that are joined by routes, and these routes.

    Attributes:
        workers: in the order in which routes come to them.
        routes: in the order of their micro-batches.
        ways: the hops that routes have, each once, in the order in which they are met.
        taken: for each route, the index of its way.
    """

    workers: tuple[int, ...]
    routes: tuple[Route, ...]
    ways: tuple[Way, ...]
    taken: tuple[int, ...]


def components(routes: Sequence[Route]) -> list[Component]:
    """The components of these routes, in the order of their first ones; workers on no route are in none."""
    ways, taken = different_ways(route.hops for route in routes)
    root = _joined(ways)
    numbers: dict[int, list[int]] = {}
    for number, way in enumerate(taken):
        numbers.setdefault(root[ways[way][0].worker], []).append(number)
    return [_component(routes, ways, taken, own) for own in numbers.values()]


def different_ways(hops_of_routes: Iterable[Way]) -> tuple[list[Way], list[int]]:
    """The different hops that routes have, as they are met, and for each route the index of its own.

    Hops are slow to hash, and routes mostly share them, so most are known by their identity.
    """
    by_hops: dict[Way, int] = {}
    # Each with its hops, so that none goes away and leaves its identity to another.
    by_identity: dict[int, tuple[Way, int]] = {}
    taken: list[int] = []
    for hops in hops_of_routes:
        known = by_identity.get(id(hops))
        if known is None:
            known = by_identity[id(hops)] = hops, by_hops.setdefault(hops, len(by_hops))
        taken.append(known[1])
    return list(by_hops), taken


def _joined(ways: Iterable[Way]) -> dict[int, int]:
    """For each worker one that stands for its component."""
    parent: dict[int, int] = {}

    def root(worker: int) -> int:
        while parent.setdefault(worker, worker) != worker:
            parent[worker] = worker = parent[parent[worker]]
        return worker

    for hops in ways:
        first = root(hops[0].worker)
        for hop in hops:
            parent[root(hop.worker)] = first
    return {worker: root(worker) for worker in list(parent)}


def _component(routes: Sequence[Route], ways: Sequence[Way], taken: Sequence[int], numbers: Sequence[int]) -> Component:
    own = {way: index for index, way in enumerate(dict.fromkeys(taken[number] for number in numbers))}
    return Component(
        workers=tuple(dict.fromkeys(hop.worker for way in own for hop in ways[way])),
        routes=tuple(routes[number] for number in numbers),
        ways=tuple(ways[way] for way in own),
        taken=tuple(own[taken[number]] for number in numbers),
    )
