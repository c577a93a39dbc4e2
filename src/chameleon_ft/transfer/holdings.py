"""Holdings: the layers of workers and of places of a new placement, and how much of one the other lacks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import state_bytes
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule.records import Integers
from chameleon_ft.workload import LayerCost

__all__ = [
    "Holding",
    "groups_of",
    "holdings_of",
    "lacking_bytes",
    "missing_between",
    "moved_bytes",
    "worker_kinds",
]


@dataclass(frozen=True, slots=True)
class Holding:
    """The layers of a worker now, or of a place of a new placement.

    Attributes:
        ranges: the layers, as a `Placement` keeps them; empty for a worker that holds none.
        kind: of the worker; a place goes to a worker of an equal kind only, and those are interchangeable.
    """

    ranges: tuple[LayerRange, ...]
    kind: Hashable = None


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


def lacking_bytes(have: Sequence[Holding], wanted: Sequence[Holding], layers: Sequence[LayerCost]) -> Integers:
    """Return the bytes of state that a worker with `have[i]` lacks for `wanted[j]`, whatever their kinds.

    int64 [len(have), len(wanted)]. Raises PlanError when a range goes past the last of `layers`.
    """
    for holding in chain(have, wanted):
        if holding.ranges and holding.ranges[-1].stop > len(layers):
            raise PlanError(f"layers {holding.ranges[-1]} go past the {len(layers)} layers of the workload")
    num_bytes = np.array([state_bytes(layer) for layer in layers], dtype=np.int64)
    return (1 - _incidence(have, len(layers))) @ (_incidence(wanted, len(layers)) * num_bytes).T


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


def _incidence(holdings: Sequence[Holding], num_layers: int) -> Integers:
    """1 where holding i has layer j; int64 [holdings, layers]."""
    found = np.zeros((len(holdings), num_layers), dtype=np.int64)
    for row, holding in zip(found, holdings, strict=True):
        for layers in holding.ranges:
            row[layers.start : layers.stop] = 1
    return found
