"""Which worker takes which stage: neighbours of a pipeline, or holders of the same layers, share a host."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, pairwise
from typing import Final, TypeAlias

from chameleon_ft.cluster import Cluster
from chameleon_ft.plan import Placement
from chameleon_ft.search.pipelines.schedules import hops_of
from chameleon_ft.search.pipelines.worker_classes import Shape, WorkerPool, arrangements
from chameleon_ft.search.placement.gradient_sync import links_are_equal
from chameleon_ft.transfer import Holding, assign_roles, holdings_of
from chameleon_ft.workload import LayerCost

# Hosts that are tried as the first of an order.
_ORDERS: Final = 4
# Up to this many assignments of stages to hosts, all are tried.
_FEW_ASSIGNMENTS: Final = 300

_Workers: TypeAlias = list[tuple[int, ...]]
"""The workers of each pipeline."""


def worker_choices(
    shapes: Sequence[Shape],
    cuts: Sequence[Sequence[int]],
    pool: WorkerPool,
    cluster: Cluster,
    *,
    with_sync: bool,
    usual: bool = False,
) -> list[_Workers]:
    """Return several choices of workers for pipelines, given by their shapes and cut points.

    All choices if links matter and there are few. Otherwise, or if `usual`, neighbours share a host; and where
    gradients are reduced (`with_sync`) there are also choices in which holders of the same layers do.
    """
    every = [] if usual or not with_sync or links_are_equal(cluster) else _every_choice(shapes, pool, cluster)
    if every:
        return every
    found = [_by_pipeline(shapes, pool, cluster)]
    if len(shapes) > 1 and with_sync:
        most = _ORDERS if len(shapes) <= cluster.host_sizes[0] else 1
        found += _by_stage(shapes, cuts, _orders_of_hosts(pool, cluster, most=most))
    return [workers for number, workers in enumerate(found) if workers not in found[:number]]


def assigned_workers(
    pipelines: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    current: Placement,
    cluster: Cluster,
    layers: Sequence[LayerCost],
    *,
    keep_hosts: bool,
) -> dict[int, int]:
    """Return for each worker of pipelines, given as (cut points, workers), the equal one that holds most of its stage.

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
    return assign_roles(holdings_of(current, classes), places, layers)


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster without its hosts with the fewest workers, and so on; at last only one with the most.

    A worker alone on its host, on a slow link, slows down every ring that it is in, and may better be idle. So may the
    workers whose own links are slow, without which the first one is.
    """
    if 0 < len(cluster.badly_linked) < len(cluster.workers):
        yield cluster.without(cluster.badly_linked)
    sizes = Counter(worker.host for worker in cluster.workers)
    kept = [{host for host in sizes if sizes[host] >= size} for size in sorted(set(sizes.values()))[1:]]
    for hosts in [*kept, {max(sizes, key=sizes.__getitem__)}]:
        yield cluster.without([worker.id for worker in cluster.workers if worker.host not in hosts])


def _by_pipeline(shapes: Sequence[Shape], pool: WorkerPool, cluster: Cluster) -> _Workers:
    """Return workers of the classes of each shape, so that neighbours share a host.

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

    found: _Workers = [()] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-len(shapes[index]), shapes[index], index)):
        runs = [(kind, len(list(run))) for kind, run in groupby(shapes[index])]
        found[index] = tuple(worker for kind, count in runs for worker in take(free[kind], count))
    return found


def _by_stage(
    shapes: Sequence[Shape], cuts: Sequence[Sequence[int]], orders: Iterable[Sequence[Sequence[int]]]
) -> list[_Workers]:
    """Return, for several orders of the members, workers such that holders of the same layers share a host.

    Stages take workers of their class in the order of the members, in the order of the middles of their layers.
    """
    # Twice the middle.
    slots = sorted(
        (start + stop, index, position)
        for index, cut_points in enumerate(cuts)
        for position, (start, stop) in enumerate(pairwise((0, *cut_points)))
    )
    choices: list[_Workers] = []
    for members in orders:
        left = [iter(own) for own in members]
        found = [[0] * len(shape) for shape in shapes]
        for _, index, position in slots:
            found[index][position] = next(left[shapes[index][position]])
        choices.append(list(map(tuple, found)))
    return choices


def _orders_of_hosts(pool: WorkerPool, cluster: Cluster, *, most: int) -> list[list[list[int]]]:
    """Return the members of the pool, host by host, beginning with up to `most` different hosts; the order goes round.

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


def _every_choice(shapes: Sequence[Shape], pool: WorkerPool, cluster: Cluster) -> list[_Workers]:
    """Return every choice of the host of each stage, if all workers are of one class and there are few; else none."""
    sizes = cluster.host_sizes
    choices = math.factorial(sum(sizes)) // math.prod(map(math.factorial, sizes))
    if len(pool.classes) > 1 or choices > _FEW_ASSIGNMENTS:
        return []
    members: dict[str, list[int]] = defaultdict(list)
    for worker, host in cluster.hosts.items():
        members[host].append(worker)
    found: list[_Workers] = []
    for hosts in arrangements({host: len(own) for host, own in members.items()}, sum(map(len, shapes))):
        left = {host: iter(own) for host, own in members.items()}
        workers = iter([next(left[host]) for host in hosts])
        found.append([tuple(islice(workers, len(shape))) for shape in shapes])
    return found
