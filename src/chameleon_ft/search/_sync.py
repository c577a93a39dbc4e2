"""Gradient sync of pipelines side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import SyncCost
from chameleon_ft.search._stages import links_between

_ROUNDING: Final = 1e-9

# By so much the numbers of pipelines that share a bound may differ. Their rings take nearly the same time.
_ALIKE: Final = 0.1


def largest_host(cluster: Cluster) -> int:
    """Workers of the host that has most."""
    return cluster.host_sizes[0]


def links_are_equal(cluster: Cluster) -> bool:
    """Whether it does not matter which workers share a host."""
    hosts = len(set(cluster.hosts.values()))
    return cluster.intra_host == cluster.inter_host or hosts in (1, len(cluster.workers))


class LeastSync:
    """What a stage has to reduce with its holders in so many pipelines, at the least, in steps of up to `most_s`.

    A ring of more workers than a host has goes between hosts, and its slowest link sets the pace. A smaller one may lie
    inside a host. Then that host alone computes these layers, for all micro-batches; so there are only so many of them,
    and a stage that has more reduces the rest of them between hosts.
    """

    def __init__(self, costs: CostModel, most_s: float) -> None:
        self._costs = costs
        self._most_s = most_s
        self._known: dict[int, SyncCost] = {}
        self._inside: dict[float, float] = {}

    def of(self, pipelines: int) -> SyncCost:
        """That of so many of them."""
        found = self._known.get(pipelines)
        if found is None:
            found = self._known[pipelines] = self._of(pipelines)
        return found

    def _of(self, pipelines: int) -> SyncCost:
        cluster = self._costs.cluster
        if pipelines < 2:
            return SyncCost()
        between_hosts = pipelines > largest_host(cluster)
        links = [cluster.inter_host] if between_hosts else links_between(cluster)
        latency_s = min(link.latency_s for link in links)
        per_byte_s = 1 / max(link.bytes_per_s for link in links)
        passes = 2 * (pipelines - 1) / pipelines
        least = SyncCost(2 * (pipelines - 1) * latency_s, passes * per_byte_s)
        slower_s = 1 / cluster.inter_host.bytes_per_s - per_byte_s
        if between_hosts or cluster.inter_host not in links or slower_s <= 0:
            return least
        return SyncCost(least.fixed_s, least.per_byte_s, self._inside_bytes(pipelines), passes * slower_s)

    @cached_property
    def _busy(self) -> list[tuple[float, float]]:
        """(seconds, bytes) of the layers that take time."""
        layers = self._costs.workload.layers
        timed = ((layer.forward_s + layer.least_backward_s, float(layer.gradient_bytes)) for layer in layers)
        return [(own_s, size) for own_s, size in timed if own_s > 0]

    @cached_property
    def _hosts(self) -> list[tuple[int, float]]:
        """Workers of each host, and their speed together."""
        speeds: dict[str, list[float]] = defaultdict(list)
        for worker in self._costs.cluster.workers:
            speeds[worker.host].append(worker.speed)
        return [(len(own), sum(own)) for own in speeds.values()]

    def _inside_bytes(self, pipelines: int) -> float:
        """The most gradients of layers that take time, which one host can have computed in the step.

        It has a worker for each pipeline. No more than parts of layers, those with most bytes for their time, fit into
        its time; and no more layers than of those that take least.
        """
        if self._most_s == math.inf:
            return sum(size for _, size in self._busy)
        speed = max((own for count, own in self._hosts if count >= pipelines), default=0.0)
        if speed not in self._inside:
            self._inside[speed] = self._inside_of(speed)
        return self._inside[speed]

    def _inside_of(self, speed: float) -> float:
        busy = self._busy
        budget_s = self._most_s * speed / self._costs.workload.micro_batches * (1 + _ROUNDING)
        count = sum(until_s <= budget_s for until_s in accumulate(sorted(own_s for own_s, _ in busy)))
        by_count = sum(sorted((size for _, size in busy), reverse=True)[:count])
        by_parts = 0.0
        for own_s, size in sorted(busy, key=lambda layer: -layer[1] / layer[0]):
            by_parts += size * min(1.0, budget_s / own_s)
            budget_s = max(0.0, budget_s - own_s)
        return min(by_count, by_parts)


def numbers_of_pipelines(most: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, last) that cover 2 to `most`, each of numbers that are nearly the same."""
    first = 2
    while first <= most:
        last = min(most, int(first * (1 + _ALIKE)))
        yield first, last
        first = last + 1


def about(pipelines: int, cluster: Cluster) -> int:
    """A number that is no larger, and whose rings take nearly as long: 2, 3, 4, 6, 8, 12, 16, ...

    Searches that share it share most of their work.
    """
    power = 1 << (pipelines.bit_length() - 1)
    found = power + power // 2 if pipelines >= power + power // 2 else power
    between_hosts = largest_host(cluster) + 1
    return max(found, between_hosts) if pipelines >= between_hosts else found
