"""Workers that cannot be told apart by speed and memory, and the order in which they are taken."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from chameleon_ft.cluster import Cluster

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
