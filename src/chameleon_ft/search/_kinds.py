"""Workers that cannot be told apart by speed and memory, and the order in which they are taken."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.cluster import Cluster

# So many kinds are told apart however many workers there are, and more where there are few ways to choose from them.
_KINDS: Final = 3
_FEW_WAYS: Final = 300
# The kinds of a pipeline's workers, first stage to last, as indices into `Crew.kinds`.
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a worker can do: speed, and bytes of memory (None: not checked)."""

    speed: float
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Crew:
    """The live workers by kind, the fastest kind first; of each kind host by host.

    Hosts with the fewest live workers come first, so that the loss of one worker leads to equal plans whichever it is.
    """

    kinds: tuple[Kind, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Crew:
        sizes = Counter(worker.host for worker in cluster.workers)
        by_size = sorted(sizes, key=sizes.__getitem__)
        places = {host: place for place, host in enumerate(by_size)}
        found: dict[Kind, list[tuple[int, int]]] = defaultdict(list)
        for worker in cluster.workers:
            found[Kind(worker.speed, worker.memory_bytes)].append((places[worker.host], worker.id))
        # An unknown memory is not checked: as good as any.
        kinds = sorted(found, key=lambda kind: (-kind.speed, kind.memory_bytes is not None, -(kind.memory_bytes or 0)))
        return cls(tuple(kinds), tuple(tuple(worker for _, worker in sorted(found[kind])) for kind in kinds))

    @property
    def counts(self) -> tuple[int, ...]:
        """Workers of each kind."""
        return tuple(map(len, self.members))

    @property
    def speed(self) -> float:
        """Of all workers together."""
        return sum(kind.speed * count for kind, count in zip(self.kinds, self.counts, strict=True))

    def sample(self, shape: Shape) -> tuple[int, ...]:
        """Some workers of these kinds; there must be enough."""
        taken = [0] * len(self.kinds)
        workers: list[int] = []
        for kind in shape:
            workers.append(self.members[kind][taken[kind]])
            taken[kind] += 1
        return tuple(workers)


def grouped(cluster: Cluster) -> Cluster:
    """The cluster with its many kinds of workers made few: each worker as slow and as small as the least of its group.

    Kinds whose speeds differ least are put together first. What holds for a plan on these workers holds for the real
    ones, which may be faster.
    """
    crew = Crew.of(cluster)
    groups = [[kind] for kind in range(len(crew.kinds))]
    if math.prod(count + 1 for count in crew.counts) <= _FEW_WAYS:
        return cluster
    while len(groups) > _KINDS:
        ratios = [
            crew.kinds[groups[place][0]].speed / crew.kinds[groups[place + 1][-1]].speed
            for place in range(len(groups) - 1)
        ]
        nearest = min(range(len(ratios)), key=ratios.__getitem__)
        groups[nearest : nearest + 2] = [groups[nearest] + groups[nearest + 1]]
    least: dict[int, Kind] = {}
    for group in groups:
        known = [memory for kind in group if (memory := crew.kinds[kind].memory_bytes) is not None]
        kind = Kind(min(crew.kinds[kind].speed for kind in group), min(known, default=None))
        least.update((worker, kind) for member in group for worker in crew.members[member])
    workers = tuple(
        replace(worker, speed=least[worker.id].speed, memory_bytes=least[worker.id].memory_bytes)
        for worker in cluster.workers
    )
    return Cluster(workers, cluster.intra_host, cluster.inter_host)
