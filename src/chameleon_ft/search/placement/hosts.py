"""Which worker takes which stage: neighbours of a pipeline, or holders of the same layers, share a host."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, pairwise
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.plan import Placement
from chameleon_ft.search.placement.gradient_sync import links_are_equal
from chameleon_ft.search.pipelines.schedules import hops_of
from chameleon_ft.search.pipelines.worker_classes import Shape, WorkerPool
from chameleon_ft.transfer import Holding, assign_roles, holdings_of
from chameleon_ft.workload import LayerCost

__all__ = ["PlacementSearch", "assigned_workers", "smaller_clusters"]

# Hosts that are tried as the first of an order.
_ORDERS: Final = 4
# Up to this many assignments of stages to hosts, all are tried.
_FEW_WAYS: Final = 300


class PlacementSearch:
    """Ways to place pipelines on the workers of a pool.

    Args:
        with_sync: whether gradients are reduced, so that it matters which workers hold the same layers.
    """

    def __init__(self, pool: WorkerPool, cluster: Cluster, *, with_sync: bool) -> None:
        self._pool = pool
        self._cluster = cluster
        self._with_sync = with_sync

    def ways(self, shapes: Sequence[Shape], cuts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
        """Workers for each pipeline: all ways if links matter and there are few, else the usual ones."""
        links_matter = self._with_sync and not links_are_equal(self._cluster)
        every = _every_way(shapes, self._pool, self._cluster) if links_matter else []
        return every or self.usual_ways(shapes, cuts)

    def usual_ways(self, shapes: Sequence[Shape], cuts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
        """Workers for each pipeline: with neighbours on one host; and where gradients are reduced, also with holders of
        the same layers on one host, in several ways where a host has room for them."""
        ways = [_by_pipeline(shapes, self._pool, self._cluster)]
        if len(shapes) > 1 and self._with_sync:
            most = _ORDERS if len(shapes) <= self._cluster.host_sizes[0] else 1
            ways += _by_stage(shapes, cuts, _orders_of_hosts(self._pool, self._cluster, most=most))
        return [way for number, way in enumerate(ways) if way not in ways[:number]]


def assigned_workers(
    pipelines: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    current: Placement,
    cluster: Cluster,
    layers: Sequence[LayerCost],
    *,
    keep_hosts: bool,
) -> list[tuple[int, ...]]:
    """For each pipeline, given by its cut points and its workers, equal workers that hold most of its stages already.

    With `keep_hosts` a stage stays on its host, so that links, and with them times, stay as they are.
    """
    classes = {
        worker.id: (worker.speed, worker.memory_bytes, worker.host if keep_hosts else None)
        for worker in cluster.workers
    }
    places = {
        hop.worker: Holding((hop.layers,), classes[hop.worker])
        for cut_points, workers in pipelines
        for hop in hops_of(workers, cut_points)
    }
    roles = assign_roles(holdings_of(current, classes), places, layers)
    return [tuple(roles[worker] for worker in workers) for _, workers in pipelines]


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster without its hosts with the fewest workers, and so on; at last only one of those that have most.

    A worker alone on its host, on a slow link, slows down every ring that it is in, and may better be idle.
    """
    sizes = Counter(worker.host for worker in cluster.workers)
    kept = [{host for host in sizes if sizes[host] >= size} for size in sorted(set(sizes.values()))[1:]]
    for hosts in [*kept, {max(sizes, key=sizes.__getitem__)}]:
        yield cluster.without([worker.id for worker in cluster.workers if worker.host not in hosts])


def _by_pipeline(shapes: Sequence[Shape], pool: WorkerPool, cluster: Cluster) -> list[tuple[int, ...]]:
    """For each shape, in order, workers of its classes, so that neighbours share a host.

    Deep pipelines choose first: of the hosts with room for all workers of a class that they need, the fullest; if there
    is none, the emptiest, and the next one for the rest. Not proven to cross hosts the fewest times.
    """
    free: list[dict[str, list[int]]] = []
    for members in pool.members:
        by_host: dict[str, list[int]] = defaultdict(list)
        for worker in members:
            by_host[cluster.worker(worker).host].append(worker)
        free.append(by_host)

    def take(by_host: dict[str, list[int]], count: int) -> list[int]:
        # Hosts of many workers come last in a pool, and go first among equals.
        hosts = list(reversed(by_host.values()))
        own = min((host for host in hosts if len(host) >= count), key=len, default=max(hosts, key=len))
        taken = own[:count]
        del own[:count]
        return taken if len(taken) == count else [*taken, *take(by_host, count - len(taken))]

    found: list[tuple[int, ...]] = [()] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-len(shapes[index]), shapes[index], index)):
        runs = [(kind, len(list(run))) for kind, run in groupby(shapes[index])]
        found[index] = tuple(worker for kind, count in runs for worker in take(free[kind], count))
    return found


def _by_stage(
    shapes: Sequence[Shape], cuts: Sequence[Sequence[int]], orders: Iterable[Sequence[Sequence[int]]]
) -> list[list[tuple[int, ...]]]:
    """For several orders of the members, workers such that holders of the same layers share a host.

    Stages take workers of their class in the order of the members, in the order of the middles of their layers.
    """
    # Twice the middle.
    slots = sorted(
        (start + stop, index, position)
        for index, cut_points in enumerate(cuts)
        for position, (start, stop) in enumerate(pairwise((0, *cut_points)))
    )
    ways: list[list[tuple[int, ...]]] = []
    for members in orders:
        left = [iter(own) for own in members]
        found = [[0] * len(shape) for shape in shapes]
        for _, index, position in slots:
            found[index][position] = next(left[shapes[index][position]])
        ways.append(list(map(tuple, found)))
    return ways


def _orders_of_hosts(pool: WorkerPool, cluster: Cluster, *, most: int) -> list[list[list[int]]]:
    """The members of the pool, host by host, beginning with up to `most` different hosts; the order goes round.

    Which stages share a host depends on where the hosts with fewer workers are in it. Where all have as many, there is
    one order.
    """
    sizes = Counter(worker.host for worker in cluster.workers)
    hosts = sorted(sizes, key=sizes.__getitem__)
    if len(set(sizes.values())) == 1:
        return [[list(own) for own in pool.members]]
    found: list[list[list[int]]] = []
    for number in range(min(most, len(hosts))):
        first = number * len(hosts) // min(most, len(hosts))
        places = {host: place for place, host in enumerate([*hosts[first:], *hosts[:first]])}
        found.append([sorted(own, key=lambda worker: places[cluster.worker(worker).host]) for own in pool.members])
    return found


def _every_way(shapes: Sequence[Shape], pool: WorkerPool, cluster: Cluster) -> list[list[tuple[int, ...]]]:
    """Every way to choose the host of each stage, if the workers are of one class and there are few ways; else none."""
    sizes = cluster.host_sizes
    ways = math.factorial(sum(sizes)) // math.prod(map(math.factorial, sizes))
    if len(pool.classes) > 1 or ways > _FEW_WAYS:
        return []
    hosts_of = cluster.hosts
    by_host = [[worker for worker in hosts_of if hosts_of[worker] == host] for host in dict.fromkeys(hosts_of.values())]
    found: list[list[tuple[int, ...]]] = []
    for hosts in _host_orders([len(own) for own in by_host], sum(map(len, shapes))):
        left = [iter(own) for own in by_host]
        workers = iter([next(left[host]) for host in hosts])
        found.append([tuple(islice(workers, len(shape))) for shape in shapes])
    return found


def _host_orders(free: list[int], slots: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each slot a host that has a free worker."""
    if not slots:
        yield ()
        return
    for host, count in enumerate(free):
        if count:
            rest = [*free[:host], count - 1, *free[host + 1 :]]
            for order in _host_orders(rest, slots - 1):
                yield (host, *order)
