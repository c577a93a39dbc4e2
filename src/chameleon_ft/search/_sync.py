"""Gradient sync of pipelines side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.search._bounds import SyncCost
from chameleon_ft.search._stages import links_between

# By so much the numbers of pipelines that share a bound may differ. Their rings take nearly the same time.
_ALIKE: Final = 0.1


def largest_host(cluster: Cluster) -> int:
    """Workers of the host that has most."""
    return cluster.host_sizes[0]


def least_sync(cluster: Cluster, pipelines: int) -> SyncCost:
    """What a stage has to reduce with its holders in so many pipelines, at the least: a ring over the fastest links.

    A ring of more workers than a host has goes between hosts, and its slowest link sets the pace.
    """
    if pipelines < 2:
        return SyncCost()
    links = [cluster.inter_host] if pipelines > largest_host(cluster) else links_between(cluster)
    latency_s = min(link.latency_s for link in links)
    bytes_per_s = max(link.bytes_per_s for link in links)
    return SyncCost(2 * (pipelines - 1) * latency_s, 2 * (pipelines - 1) / pipelines / bytes_per_s)


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
