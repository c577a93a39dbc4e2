"""Who holds what: workers and places that cannot be told apart, and how much each lacks for each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, TypeAlias

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import state_bytes
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.workload import LayerCost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Holding",
    "groups_of",
    "holdings_of",
    "lacking_bytes",
    "missing_between",
    "missing_layers",
    "moved_bytes",
    "worker_kinds",
]

Integers: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True, slots=True)
class Holding:
    """What a worker holds now, or what a place (slot) of a new placement is to hold, and the kind of worker.

    Attributes:
        ranges: the layers, as a `Placement` keeps them; empty for a worker that holds none.
        kind: a place goes to a worker of an equal kind only. Workers of a kind are as good as each other.
    """

    ranges: tuple[LayerRange, ...]
    kind: Hashable = None


def worker_kinds(cluster: Cluster) -> dict[int, Hashable]:
    """Each worker's kind, where all that counts is its speed and its memory."""
    return {worker.id: (worker.speed, worker.memory_bytes) for worker in cluster.workers}


def holdings_of(placement: Placement | None, kinds: Mapping[int, Hashable]) -> dict[int, Holding]:
    """What each worker of `kinds` holds in `placement`; in None nobody holds anything. Ascending by worker."""
    ranges = {} if placement is None else placement.ranges
    return {worker: Holding(ranges.get(worker, ()), kinds[worker]) for worker in sorted(kinds)}


def groups_of(holdings: Mapping[int, Holding]) -> list[tuple[Holding, list[int]]]:
    """Workers (or places) by what they hold, each group in the order of `holdings`."""
    # By plain numbers, for ranges of layers are slow to hash.
    groups: dict[Hashable, tuple[Holding, list[int]]] = {}
    for worker, holding in holdings.items():
        key = holding.kind, *[end for layers in holding.ranges for end in (layers.start, layers.stop)]
        if key not in groups:
            groups[key] = holding, []
        groups[key][1].append(worker)
    return list(groups.values())


def lacking_bytes(have: Sequence[Holding], wanted: Sequence[Holding], layers: Sequence[LayerCost]) -> Integers:
    """Bytes of parameters and optimizer state that a worker with `have[i]` lacks for `wanted[j]`.

    Returns:
        int64 [len(have), len(wanted)]. Kinds are not looked at.

    Raises:
        PlanError: a range goes past the last of `layers`.
    """
    import numpy as np

    for holding in chain(have, wanted):
        if holding.ranges and holding.ranges[-1].stop > len(layers):
            raise PlanError(f"layers {holding.ranges[-1]} go past the {len(layers)} layers of the workload")
    num_bytes = np.array([state_bytes(layer) for layer in layers], dtype=np.int64)
    needed = _incidence(wanted, len(layers)) * num_bytes
    absent = 1 - _incidence(have, len(layers))
    return absent @ needed.T


def missing_layers(had: Holding, wanted: Holding) -> list[int]:
    """The layers of `wanted` that are not in `had`, ascending."""
    held = {layer for layers in had.ranges for layer in layers}
    return [layer for layers in wanted.ranges for layer in layers if layer not in held]


def moved_bytes(current: Placement | None, new: Placement, layers: Sequence[LayerCost]) -> int:
    """Bytes of parameters and optimizer state that the workers of `new` lack for it, if each keeps its place."""
    before = list(accumulate((state_bytes(layer) for layer in layers), initial=0))
    held = {} if current is None else current.ranges
    return sum(missing_between(held.get(worker, ()), ranges, before) for worker, ranges in new.ranges.items())


def missing_between(had: Sequence[LayerRange], wanted: Sequence[LayerRange], before: Sequence[int]) -> int:
    """What the layers of `wanted` that are not in `had` come to, where `before[i]` is what all before layer i do.

    Each of both as a `Placement` keeps them, so that none of it overlaps.
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
    """1 where holding i has layer j."""
    import numpy as np

    found = np.zeros((len(holdings), num_layers), dtype=np.int64)
    for row, holding in zip(found, holdings, strict=True):
        for layers in holding.ranges:
            row[layers.start : layers.stop] = 1
    return found
