"""The array types of networks, programs and kernels; and the components of a plan, workers that routes join.

Different components do not interact during a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.plan import Hop, Route

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Booleans: TypeAlias = NDArray[np.bool_]
Records: TypeAlias = NDArray[np.void]

SLOT: Final = np.dtype(
    [
        ("worker", np.int64),
        ("down", np.int64),
        ("up", np.int64),
        ("forward_s", np.float64),
        ("backward_s", np.float64),
        ("weight_s", np.float64),
        ("down_s", np.float64),
        ("up_s", np.float64),
        ("last", np.bool_),
        ("runs_forward", np.bool_),
        ("runs_backward", np.bool_),
        ("runs_weight_grad", np.bool_),
        ("start", np.int64),
        ("stop", np.int64),
    ],
    align=True,
)
"""A slot of a network. Times in seconds.

worker: index of the slot's worker. down, up: channel of F's result and of B's or I's; `up` is -1 for the first slot of
a route. forward_s, backward_s, weight_s: durations of F, of B or I, and of W (zero where there is none). down_s, up_s:
message time of F's result and of B's or I's. last: whether the slot is the last of its route. runs_forward,
runs_backward, runs_weight_grad: whether F, B or I, and W are to be run; in a whole step only W may be missing. start,
stop: its layers.
"""

CHANNEL: Final = np.dtype([("sender", np.int64), ("receiver", np.int64), ("gradient", np.bool_)], align=True)
"""A channel: the indices of sender and receiver, and whether it carries gradients.

A worker's channel to itself carries tensors between its own hops, and from its F to its B where a route turns.
"""

OPERATION: Final = np.dtype([("needs", np.int64), ("delay_s", np.float64), ("duration_s", np.float64)], align=True)
"""The predecessor of an operation, and its times in seconds.

needs: the number of the operation whose output it needs; -1 for none, and its own number if no operation makes that.
delay_s: message time from there, or when the input arrives if no operation makes it. duration_s: how long the operation
takes.
"""

PROGRAM_RECORD: Final = np.dtype(
    [
        ("kind", "u1"),
        ("micro_batch", "<i4"),
        ("hop", "<i4"),
        ("start", "<i4"),
        ("stop", "<i4"),
        ("receive_from", "<i4"),
        ("send_to", "<i4"),
        ("first", "?"),
        ("last", "?"),
        ("recompute_start", "<i4"),
        ("recompute_stop", "<i4"),
        ("recompute_selective", "<i4"),
    ]
)
"""An operation of a program, as `Operation` has it.

kind: F, B, I, W are 0, 1, 2, 3. start, stop: its layers. receive_from, send_to: -1 for no worker.
recompute_start, recompute_stop, recompute_selective: the layers that are recomputed, and how many of them, the last
ones, selectively; all 0 for none.
"""


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
    """Return the representative of each worker's component (union-find)."""
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
