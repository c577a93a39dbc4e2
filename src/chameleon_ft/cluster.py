"""The cluster: workers with their speeds, and the links between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from chameleon_ft.errors import ConfigError

__all__ = ["Cluster", "Link", "Worker"]


@dataclass(frozen=True, slots=True)
class Link:
    """A connection over which a message of n bytes takes `latency_s + n / bytes_per_s` seconds.

    `bytes_per_s` may be `math.inf`. Raises ConfigError when the latency is negative or the bandwidth not positive.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ConfigError(f"latency_s of a link must be zero or a positive number; got {self.latency_s}")
        if not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s of a link must be positive; got {self.bytes_per_s}")

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds from the start of a send of `num_bytes` until it has arrived."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def ring_all_reduce_s(self, num_bytes: float, workers: int) -> float:
        """Return the seconds of an all-reduce of `num_bytes` in a ring; zero for one worker, or no bytes.

        A ring of n workers takes 2 (n - 1) steps, each with an n-th of the bytes (Patarasuk and Yuan 2009).
        """
        if not num_bytes:
            return 0.0
        return 2 * (workers - 1) * self.message_s(num_bytes / workers)


@dataclass(frozen=True, slots=True)
class Worker:
    """The unit that holds a stage and fails as a whole: the ranks of one tensor-parallel group, or one rank.

    Attributes:
        id: number of the worker, unique in the cluster and kept for the whole run.
        host: name of the machine; workers with equal names are joined by the intra-host link.
        speed: 1 / (time an operation takes here relative to a worker of speed 1).
        memory_bytes: capacity, or None if it is unknown and not checked.

    Raises:
        ConfigError: a negative id, or a speed or memory that is not positive.
    """

    id: int
    host: str
    speed: float = 1.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.id < 0:
            raise ConfigError(f"a worker id must be zero or a positive integer; got {self.id}")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ConfigError(f"speed of worker {self.id} must be positive; got {self.speed}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(
                f"memory_bytes of worker {self.id} must be positive, or None if unknown; got {self.memory_bytes}"
            )


@dataclass(frozen=True)
class Cluster:
    """The workers and the two kinds of links between them.

    Attributes:
        slow_links: (worker, worker, share) of links that have only this share of the bandwidth of their kind, with
            ascending workers; those of workers that are not in the cluster do not count.

    Raises ConfigError if two workers share an id, or a share is not above 0 and at most 1. A cluster may be empty,
    because all workers can fail.
    """

    workers: tuple[Worker, ...]
    intra_host: Link
    inter_host: Link
    slow_links: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        for a, b, share in self.slow_links:
            if not 0 < share <= 1:
                raise ConfigError(f"the link of workers {a} and {b} must have a share above 0 and up to 1; got {share}")
        if len(self._by_id) < len(self.workers):
            twice = next(worker for worker in self.workers if self._by_id[worker.id] is not worker)
            raise ConfigError(f"worker {twice.id} is in the cluster twice; give every worker its own id")

    @cached_property
    def _by_id(self) -> dict[int, Worker]:
        return {worker.id: worker for worker in self.workers}

    @cached_property
    def host_sizes(self) -> tuple[int, ...]:
        """The number of workers of each host, the most first."""
        return tuple(sorted(Counter(worker.host for worker in self.workers).values(), reverse=True))

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each worker."""
        return {worker.id: worker.host for worker in self.workers}

    def worker(self, worker_id: int) -> Worker:
        """Return the worker with this id. Raises ConfigError if there is none."""
        try:
            return self._by_id[worker_id]
        except KeyError:
            known = ", ".join(map(str, sorted(self._by_id))) or "none"
            raise ConfigError(f"worker {worker_id} is not in the cluster; its workers are: {known}") from None

    def capacity_bytes(self, worker_id: int) -> float:
        """Return the memory of a worker in bytes; infinity if it is unknown. Raises ConfigError like `worker`."""
        memory_bytes = self.worker(worker_id).memory_bytes
        return math.inf if memory_bytes is None else memory_bytes

    def link(self, a: int, b: int) -> Link:
        """Return the link between two workers: inside a host if both are on it, else between hosts."""
        link = self.intra_host if self.worker(a).host == self.worker(b).host else self.inter_host
        share = self._shares.get((min(a, b), max(a, b))) if self.slow_links else None
        return link if share is None else replace(link, bytes_per_s=link.bytes_per_s * share)

    @cached_property
    def _shares(self) -> dict[tuple[int, int], float]:
        return {(a, b): share for a, b, share in self.slow_links}

    def ring_all_reduce_s(self, workers: Collection[int], num_bytes: float) -> float:
        """Return the seconds of an all-reduce of `num_bytes` in a ring of these workers; zero for a single one.

        The ring passes through them host by host; its slowest link determines the time of every step.
        """
        if self.slow_links and len(workers) > 1:
            ring = sorted(workers, key=lambda worker: (self.worker(worker).host, worker))
            every = {self.link(*ends) for ends in pairwise([*ring, ring[0]])}
            return max(link.ring_all_reduce_s(num_bytes, len(ring)) for link in every)
        count, hosts = len(workers), len({self.worker(worker).host for worker in workers})
        links = ([self.inter_host] if hosts > 1 else []) + ([self.intra_host] if count > hosts else [])
        return max((link.ring_all_reduce_s(num_bytes, count) for link in links), default=0.0)

    @cached_property
    def badly_linked(self) -> tuple[int, ...]:
        """The workers of whose links most are slow; if there are none, both ends of every slow link. Ascending."""
        present = [pair for pair in self._shares if self._by_id.keys() >= set(pair)]
        ends = Counter(worker for pair in present for worker in pair)
        most = tuple(sorted(worker for worker, count in ends.items() if 2 * count >= len(self.workers)))
        return most or tuple(sorted(ends))

    def without(self, ids: Collection[int]) -> Cluster:
        """Return the cluster without the workers with these ids; ids that it does not have are ignored."""
        gone = frozenset(ids)
        return self.of(tuple(w for w in self.workers if w.id not in gone))

    def of(self, workers: tuple[Worker, ...]) -> Cluster:
        """Return the cluster of other workers, with the same links."""
        return Cluster(workers, self.intra_host, self.inter_host, self.slow_links)
