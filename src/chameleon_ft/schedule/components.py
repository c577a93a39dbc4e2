"""Connected components of a plan: workers that routes join. Different components do not interact during a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from chameleon_ft.plan import Hop, Route
from chameleon_ft.schedule.records import Integers, Records

HopPath = tuple[Hop, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Workers that routes join, and these routes.

    Attributes:
        workers: in the order in which the routes pass them.
        routes: in the order of their micro-batches.
        paths: the distinct hop sequences of the routes, in the order of their first use.
        path_of: the index of each route's path.
    """

    workers: tuple[int, ...]
    routes: tuple[Route, ...]
    paths: tuple[HopPath, ...]
    path_of: tuple[int, ...]

    @property
    def is_pipeline(self) -> bool:
        """Whether all micro-batches take one path, which visits every worker once."""
        return len(self.paths) == 1 and len(self.paths[0]) == len(self.workers)


def components(routes: Sequence[Route]) -> list[Component]:
    """Return the components of these routes, in the order of their first routes."""
    paths, path_of = distinct_paths(route.hops for route in routes)
    root = _representatives(paths)
    numbers: dict[int, list[int]] = {}
    for number, path in enumerate(path_of):
        numbers.setdefault(root[paths[path][0].worker], []).append(number)
    found: list[Component] = []
    for own in numbers.values():
        places = {path: place for place, path in enumerate(dict.fromkeys(path_of[number] for number in own))}
        found.append(
            Component(
                workers=tuple(dict.fromkeys(hop.worker for path in places for hop in paths[path])),
                routes=tuple(routes[number] for number in own),
                paths=tuple(paths[path] for path in places),
                path_of=tuple(places[path_of[number]] for number in own),
            )
        )
    return found


def distinct_paths(hops_of_routes: Iterable[HopPath]) -> tuple[list[HopPath], list[int]]:
    """Return the distinct hop sequences of routes, in the order of their first use, and the index of each route's.

    Hashing hops is slow, and most routes share one tuple of hops, so tuples are looked up by identity first.
    """
    by_hops: dict[HopPath, int] = {}
    # Each with its hops: a reference keeps the tuple alive, so its identity is not reused.
    by_identity: dict[int, tuple[HopPath, int]] = {}
    path_of: list[int] = []
    for hops in hops_of_routes:
        if id(hops) not in by_identity:
            by_identity[id(hops)] = hops, by_hops.setdefault(hops, len(by_hops))
        path_of.append(by_identity[id(hops)][1])
    return list(by_hops), path_of


def records_of_routes(of_paths: Sequence[Records], path_of: Sequence[int]) -> tuple[Records, Integers]:
    """Return the records of routes one after the other, given those of each path, and where each route begins."""
    path = np.array(path_of)
    lengths = np.array([len(own) for own in of_paths])
    until = np.cumsum(lengths[path])
    begins = until - lengths[path]
    offsets = np.repeat((np.cumsum(lengths) - lengths)[path] - begins, lengths[path])
    # As bytes: numpy concatenates and indexes records field by field, which takes many times as long.
    dtype = of_paths[0].dtype
    every = np.concatenate([own.view(f"V{dtype.itemsize}") for own in of_paths])
    return every[offsets + np.arange(until[-1])].view(dtype), begins


def _representatives(paths: Iterable[HopPath]) -> dict[int, int]:
    """The representative of each worker's component (union-find)."""
    parent: dict[int, int] = {}

    def root(worker: int) -> int:
        while parent.setdefault(worker, worker) != worker:
            parent[worker] = worker = parent[parent[worker]]
        return worker

    for hops in paths:
        first = root(hops[0].worker)
        for hop in hops:
            parent[root(hop.worker)] = first
    return {worker: root(worker) for worker in list(parent)}
