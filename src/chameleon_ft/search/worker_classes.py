"""Workers that differ neither in speed nor in memory form a class; a pool is the live workers by class."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from chameleon_ft.cluster import Cluster

__all__ = ["Shape", "WorkerClass", "WorkerPool", "merged_clusters"]

Shape: TypeAlias = tuple[int, ...]
"""The class of each worker of a pipeline, first stage to last, as an index into `WorkerPool.classes`."""

# Up to this many classes are searched as they are, and more if there are few ways to choose workers from them.
_MAX_CLASSES: Final = 3
_FEW_WAYS: Final = 300


@dataclass(frozen=True, slots=True)
class WorkerClass:
    """Speed, and memory in bytes (None: not checked)."""

    speed: float
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The live workers by class, the fastest class first; the members of a class are sorted by host.

    Hosts with the fewest live workers come first, so that the loss of one worker leads to equal plans whichever worker
    of a host it is.
    """

    classes: tuple[WorkerClass, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cluster: Cluster) -> WorkerPool:
        """The pool of all workers of `cluster`."""
        sizes = Counter(worker.host for worker in cluster.workers)
        order = {host: place for place, host in enumerate(sorted(sizes, key=sizes.__getitem__))}
        found: dict[WorkerClass, list[tuple[int, int]]] = defaultdict(list)
        for worker in cluster.workers:
            found[WorkerClass(worker.speed, worker.memory_bytes)].append((order[worker.host], worker.id))
        # Memory that is not checked counts as unlimited.
        classes = sorted(found, key=lambda own: (-own.speed, own.memory_bytes is not None, -(own.memory_bytes or 0)))
        return cls(tuple(classes), tuple(tuple(worker for _, worker in sorted(found[own])) for own in classes))

    @property
    def counts(self) -> tuple[int, ...]:
        """Workers of each class."""
        return tuple(map(len, self.members))

    def class_of(self) -> dict[int, int]:
        """Worker -> index of its class."""
        return {worker: number for number, members in enumerate(self.members) for worker in members}

    def sample(self, shape: Shape) -> tuple[int, ...]:
        """The first workers of these classes; there must be enough of each."""
        taken = [0] * len(self.classes)
        workers: list[int] = []
        for number in shape:
            workers.append(self.members[number][taken[number]])
            taken[number] += 1
        return tuple(workers)


def merged_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """`cluster` with few classes of workers, and then with few sizes of memory, where all are as slow as the slowest.

    The second one may hold a model for which the first one takes workers to be too small. There is none if nothing has
    to be merged in the first one.
    """
    merged = _merge_classes(cluster)
    yield merged
    if merged != cluster:
        slowest = min(worker.speed for worker in cluster.workers)
        workers = tuple(replace(worker, speed=slowest) for worker in cluster.workers)
        yield _merge_classes(Cluster(workers, cluster.intra_host, cluster.inter_host))


def _merge_classes(cluster: Cluster) -> Cluster:
    """`cluster` with few classes of workers: each worker as slow and as small as the least of its group.

    Classes whose speeds differ least are merged first, and of those with equal speeds the ones whose memory does. A
    plan that fits these workers fits the real ones and takes no longer on them.
    """
    pool = WorkerPool.of(cluster)
    groups = [[number] for number in range(len(pool.classes))]
    if math.prod(count + 1 for count in pool.counts) <= _FEW_WAYS:
        return cluster
    while len(groups) > _MAX_CLASSES:
        ratios = [_ratio(pool, groups[place : place + 2]) for place in range(len(groups) - 1)]
        nearest = min(range(len(ratios)), key=ratios.__getitem__)
        groups[nearest : nearest + 2] = [groups[nearest] + groups[nearest + 1]]
    least: dict[int, WorkerClass] = {}
    for group in groups:
        known = [memory for number in group if (memory := pool.classes[number].memory_bytes) is not None]
        own = WorkerClass(min(pool.classes[number].speed for number in group), min(known, default=None))
        least.update((worker, own) for number in group for worker in pool.members[number])
    workers = (
        replace(worker, speed=least[worker.id].speed, memory_bytes=least[worker.id].memory_bytes)
        for worker in cluster.workers
    )
    return Cluster(tuple(workers), cluster.intra_host, cluster.inter_host)


def _ratio(pool: WorkerPool, groups: Sequence[Sequence[int]]) -> tuple[float, float]:
    """The fastest speed of two groups over their slowest, and their largest memory over their smallest."""
    numbers = [number for group in groups for number in group]
    speeds = [pool.classes[number].speed for number in numbers]
    memory = [math.inf if (own := pool.classes[number].memory_bytes) is None else own for number in numbers]
    smallest = min(memory)
    return max(speeds) / min(speeds), 1.0 if smallest == math.inf else max(memory) / smallest
