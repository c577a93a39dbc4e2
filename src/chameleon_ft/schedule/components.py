"""Connected components of a plan: workers that routes join. Different components do not interact during a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from chameleon_ft.plan import Hop, Route
from chameleon_ft.schedule.records import Integers, Records

__all__ = ["Component", "Way", "components", "different_ways", "records_of_routes"]

Way = tuple[Hop, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Workers that routes join, and these routes.

    Attributes:
        workers: in the order in which the routes pass them.
        routes: in the order of their micro-batches.
        ways: the distinct hop sequences of the routes, in the order of their first use.
        taken: for each route, the index of its way.
    """

    workers: tuple[int, ...]
    routes: tuple[Route, ...]
    ways: tuple[Way, ...]
    taken: tuple[int, ...]

    @property
    def is_pipeline(self) -> bool:
        """Whether all micro-batches take one way, which visits every worker once."""
        return len(self.ways) == 1 and len(self.ways[0]) == len(self.workers)


def components(routes: Sequence[Route]) -> list[Component]:
    """Return the components of these routes, in the order of their first routes."""
    ways, taken = different_ways(route.hops for route in routes)
    root = _representatives(ways)
    numbers: dict[int, list[int]] = {}
    for number, way in enumerate(taken):
        numbers.setdefault(root[ways[way][0].worker], []).append(number)
    found: list[Component] = []
    for own in numbers.values():
        places = {way: place for place, way in enumerate(dict.fromkeys(taken[number] for number in own))}
        found.append(
            Component(
                workers=tuple(dict.fromkeys(hop.worker for way in places for hop in ways[way])),
                routes=tuple(routes[number] for number in own),
                ways=tuple(ways[way] for way in places),
                taken=tuple(places[taken[number]] for number in own),
            )
        )
    return found


def different_ways(hops_of_routes: Iterable[Way]) -> tuple[list[Way], list[int]]:
    """Return the distinct hop sequences of routes, in the order of their first use, and the index of each route's.

    Hashing hops is slow, and most routes share one tuple of hops, so tuples are looked up by identity first.
    """
    by_hops: dict[Way, int] = {}
    # Each with its hops: a reference keeps the tuple alive, so its identity is not reused.
    by_identity: dict[int, tuple[Way, int]] = {}
    taken: list[int] = []
    for hops in hops_of_routes:
        if id(hops) not in by_identity:
            by_identity[id(hops)] = hops, by_hops.setdefault(hops, len(by_hops))
        taken.append(by_identity[id(hops)][1])
    return list(by_hops), taken


def records_of_routes(of_ways: Sequence[Records], taken: Sequence[int]) -> tuple[Records, Integers]:
    """Return the records of routes one after the other, given those of each way, and where each route begins."""
    way = np.array(taken)
    lengths = np.array([len(own) for own in of_ways])
    until = np.cumsum(lengths[way])
    begins = until - lengths[way]
    offsets = np.repeat((np.cumsum(lengths) - lengths)[way] - begins, lengths[way])
    # As bytes: numpy concatenates and indexes records field by field, which takes many times as long.
    dtype = of_ways[0].dtype
    every = np.concatenate([own.view(f"V{dtype.itemsize}") for own in of_ways])
    return every[offsets + np.arange(until[-1])].view(dtype), begins


def _representatives(ways: Iterable[Way]) -> dict[int, int]:
    """The representative of each worker's component (union-find)."""
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
