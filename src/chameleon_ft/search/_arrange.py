"""Which worker takes which stage, where some links are faster than others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from chameleon_ft.cluster import Cluster
from chameleon_ft.search._bounds import Stops
from chameleon_ft.search._kinds import Crew, Shape


def by_pipeline(shapes: Sequence[Shape], crew: Crew, cluster: Cluster) -> list[tuple[int, ...]]:
    """For each shape, in order, workers of its kinds, so that neighbours in a pipeline share a host; each worker once.

    Deep pipelines choose first: of the hosts with room for all workers of a kind that they need, the fullest; if there
    is none, the emptiest, and the next one for the rest. Not proven to cross hosts the fewest times.
    """
    free = [_Free(members, cluster) for members in crew.members]
    found: list[tuple[int, ...]] = [()] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-len(shapes[index]), shapes[index], index)):
        workers: list[int] = []
        for kind, run in groupby(shapes[index]):
            workers += free[kind].take(len(list(run)))
        found[index] = tuple(workers)
    return found


def by_stage(shapes: Sequence[Shape], cuts: Sequence[Stops], members: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The same so that holders of the same layers share a host, which makes gradient sync fast.

    Stages take workers of their kind in the order of `members`, host by host, in the order of the middles of their
    layers.
    """
    (found,) = by_stage_each(shapes, cuts, [members])
    return found


def by_stage_each(
    shapes: Sequence[Shape], cuts: Sequence[Stops], orders: Iterable[Sequence[Sequence[int]]]
) -> list[list[tuple[int, ...]]]:
    """The same for several orders of the members."""
    # Twice the middle.
    slots = sorted(
        (start + stop, index, position)
        for index, stops in enumerate(cuts)
        for position, (start, stop) in enumerate(pairwise((0, *stops)))
    )
    ways: list[list[tuple[int, ...]]] = []
    for members in orders:
        left = [iter(own) for own in members]
        found = [[0] * len(shape) for shape in shapes]
        for _, index, position in slots:
            found[index][position] = next(left[shapes[index][position]])
        ways.append(list(map(tuple, found)))
    return ways


def orders_of_hosts(crew: Crew, cluster: Cluster, *, most: int) -> list[list[list[int]]]:
    """The members of the crew, host by host, beginning with up to `most` different hosts; the order goes round.

    Which stages are those that share a host depends on where the hosts with fewer workers are in it. Where all have as
    many, there is one order.
    """
    sizes = Counter(worker.host for worker in cluster.workers)
    hosts = sorted(sizes, key=sizes.__getitem__)
    if len(set(sizes.values())) == 1:
        return [[list(own) for own in crew.members]]
    found: list[list[list[int]]] = []
    for number in range(min(most, len(hosts))):
        first = number * len(hosts) // min(most, len(hosts))
        places = {host: place for place, host in enumerate([*hosts[first:], *hosts[:first]])}
        found.append([sorted(own, key=lambda worker: places[cluster.worker(worker).host]) for own in crew.members])
    return found


def fewer_hosts(cluster: Cluster) -> Iterator[set[str]]:
    """All but those with the fewest workers, and so on; at last one of those that have most."""
    sizes = Counter(worker.host for worker in cluster.workers)
    for size in sorted(set(sizes.values()))[1:]:
        yield {host for host in sizes if sizes[host] >= size}
    yield {max(sizes, key=sizes.__getitem__)}


class _Free:
    """Workers of a kind that are not taken yet, by host."""

    def __init__(self, members: Sequence[int], cluster: Cluster) -> None:
        by_host: dict[str, list[int]] = defaultdict(list)
        for worker in reversed(members):
            by_host[cluster.worker(worker).host].append(worker)
        # Hosts by the number of free workers, each a list whose last worker goes first.
        self._by_room: dict[int, list[list[int]]] = defaultdict(list)
        for host in reversed(by_host.values()):
            self._by_room[len(host)].append(host)

    def take(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            rooms = [room for room, hosts in self._by_room.items() if hosts]
            room = min((room for room in rooms if room >= wanted), default=max(rooms))
            host = self._by_room[room].pop()
            for _ in range(min(wanted, room)):
                taken.append(host.pop())
            if host:
                self._by_room[len(host)].append(host)
        return taken
