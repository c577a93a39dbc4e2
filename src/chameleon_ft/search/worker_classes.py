"""Workers that differ neither in speed nor in memory form a class; a pool is the live workers by class."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

from chameleon_ft.cluster import Cluster

T = TypeVar("T")

Shape: TypeAlias = tuple[int, ...]
"""The class of each worker of a pipeline, first stage to last, as an index into `WorkerPool.classes`."""

# A cluster is searched as it is with up to this many classes, or with up to this many numbers of workers of each.
_MAX_CLASSES: Final = 3
_MAX_NUMBERS: Final = 300


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
        """Return the pool of all workers of `cluster`."""
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
        """Return the index of the class of each worker."""
        return {worker: number for number, members in enumerate(self.members) for worker in members}

    def sample(self, shape: Shape) -> tuple[int, ...]:
        """Return the first workers of these classes; there must be enough of each."""
        members = [iter(own) for own in self.members]
        return tuple(next(members[number]) for number in shape)


def merged_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield `cluster` with few classes of workers; then with few sizes of memory, all workers as slow as the slowest.

    The second cluster may hold a model for which the first one takes workers to be too small. There is no second one if
    the first one needs no merging.
    """
    merged = _merge_classes(cluster)
    yield merged
    if merged != cluster:
        slowest = min(worker.speed for worker in cluster.workers)
        workers = tuple(replace(worker, speed=slowest) for worker in cluster.workers)
        yield _merge_classes(cluster.of(workers))


def _merge_classes(cluster: Cluster) -> Cluster:
    """Return `cluster` with few classes of workers: each worker as slow and as small as the least of its group.

    Classes whose speeds differ least are merged first, and of those with equal speeds the ones whose memory does. A
    plan that fits these workers fits the real ones and takes no longer on them.
    """
    pool = WorkerPool.of(cluster)
    if math.prod(count + 1 for count in pool.counts) <= _MAX_NUMBERS:
        return cluster
    groups = [[own] for own in pool.classes]
    while len(groups) > _MAX_CLASSES:
        nearest = min(range(len(groups) - 1), key=lambda place: _spread(groups[place] + groups[place + 1]))
        groups[nearest : nearest + 2] = [groups[nearest] + groups[nearest + 1]]
    least: dict[WorkerClass, WorkerClass] = {}
    for group in groups:
        known = [own.memory_bytes for own in group if own.memory_bytes is not None]
        least |= dict.fromkeys(group, WorkerClass(min(own.speed for own in group), min(known, default=None)))
    workers = []
    for worker in cluster.workers:
        own = least[WorkerClass(worker.speed, worker.memory_bytes)]
        workers.append(replace(worker, speed=own.speed, memory_bytes=own.memory_bytes))
    return cluster.of(tuple(workers))


def _spread(classes: Sequence[WorkerClass]) -> tuple[float, float]:
    """Return the fastest speed over the slowest, and the largest memory over the smallest."""
    speeds = [own.speed for own in classes]
    memory = [math.inf if own.memory_bytes is None else own.memory_bytes for own in classes]
    smallest = min(memory)
    return max(speeds) / min(speeds), 1.0 if smallest == math.inf else max(memory) / smallest


def arrangements(counts: Mapping[T, int], length: int) -> Iterator[tuple[T, ...]]:
    """Yield all sequences of so many items, of which each occurs up to its count."""
    if not length:
        yield ()
        return
    for item, count in counts.items():
        if count:
            for rest in arrangements({**counts, item: count - 1}, length - 1):
                yield (item, *rest)
