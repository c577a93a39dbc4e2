"""Symmetries of a plan on its cluster, and the classes of losses that they make equivalent.

An symmetry is a permutation of the live workers that maps everything a decision is made from to itself: the layers and
limits of each worker, its speed and memory, which workers share a host, and how many micro-batches take each route.
Times of operations, messages, reductions and transfers depend on nothing else, so if it maps worker a to worker b, then
the best plan after the loss of a, with all workers mapped, can be run after the loss of b, and takes as long. The
numbers of the micro-batches on a route do not matter, because all micro-batches are alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.decision_context import DecisionContext

__all__ = ["HostLossClass", "LossClass", "classes_to_prepare", "host_loss_classes", "is_symmetry", "loss_classes"]

_Colours: TypeAlias = dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossClass:
    """Workers whose losses are equivalent.

    Attributes:
        representative: one of them.
        symmetries: for each of them, the representative too, an symmetry that maps the representative to it: worker ->
            worker, for all live ones.
    """

    representative: int
    symmetries: Mapping[int, Mapping[int, int]]

    @property
    def lost(self) -> tuple[int, ...]:
        """The representative alone."""
        return (self.representative,)

    def symmetry_for(self, lost: frozenset[int]) -> Mapping[int, int] | None:
        """The symmetry for the loss of these workers; None if that is not one of the class."""
        return self.symmetries.get(next(iter(lost))) if len(lost) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLossClass:
    """Hosts whose losses, of all their workers at once, are equivalent.

    Attributes:
        lost: the live workers of one of them, ascending.
        symmetries: for each of them, by its live workers, an symmetry that maps those of that one to these.
    """

    lost: tuple[int, ...]
    symmetries: Mapping[frozenset[int], Mapping[int, int]]

    def symmetry_for(self, lost: frozenset[int]) -> Mapping[int, int] | None:
        """The symmetry for the loss of these workers; None if that is not one of the class."""
        return self.symmetries.get(lost)


def loss_classes(context: DecisionContext) -> tuple[LossClass, ...]:
    """The live workers of the plan in classes, ascending by their representatives, which are the lowest of each.

    Every symmetry has been checked, so those in a class are equivalent. Workers in different classes may be so too:
    symmetries are looked for by refining colours, which can miss one where a plan is very regular.

    Raises:
        PlanError: a worker of the plan is lost already.
    """
    structure = _Structure(context)
    alike = structure.refined(structure.ranked(structure.own))
    orders = {worker: structure.order(alike, first=worker) for worker in structure.own if structure.own[worker][0]}
    symmetries: dict[int, dict[int, Mapping[int, int]]] = {}
    for worker, order in sorted(orders.items()):
        for representative, known in symmetries.items():
            if alike[representative] == alike[worker]:
                symmetry = FrozenMap(dict(zip(orders[representative], order, strict=True)))
                if structure.is_kept_by(symmetry):
                    known[worker] = symmetry
                    break
        else:
            symmetries[worker] = {worker: FrozenMap({each: each for each in sorted(structure.own)})}
    return tuple(
        LossClass(representative=representative, symmetries=FrozenMap(known))
        for representative, known in symmetries.items()
    )


def host_loss_classes(context: DecisionContext, classes: Iterable[LossClass]) -> tuple[HostLossClass, ...]:
    """The hosts that can be lost, with two live workers or more, so that all layers are still held by others.

    An symmetry maps hosts to hosts, so that where workers of two are in the same of the `classes`, of the same
    context, the hosts come to the same too.
    """
    hosts = context.costs.cluster.hosts
    workers: dict[str, list[int]] = defaultdict(list)
    for worker in context.live:
        workers[hosts[worker]].append(worker)
    found: list[HostLossClass] = []
    known: set[str] = set()
    for each in classes:
        lost = workers[hosts[each.representative]]
        if hosts[each.representative] in known or len(lost) == 1:
            continue
        known.update(hosts[worker] for worker in each.symmetries)
        if not context.placement.without(lost).unheld_layers:
            symmetries: dict[frozenset[int], Mapping[int, int]] = {}
            for worker, symmetry in each.symmetries.items():
                symmetries.setdefault(frozenset(workers[hosts[worker]]), symmetry)
            found.append(HostLossClass(lost=tuple(lost), symmetries=FrozenMap(symmetries)))
    return tuple(found)


def classes_to_prepare(context: DecisionContext) -> tuple[list[LossClass], list[HostLossClass]]:
    """Both in the order in which decisions are prepared: first the largest of single workers, then those of hosts."""
    of_workers = loss_classes(context)
    of_hosts = host_loss_classes(context, of_workers)
    return (
        sorted(of_workers, key=lambda losses: -len(losses.symmetries)),
        sorted(of_hosts, key=lambda losses: -len(losses.symmetries)),
    )


def is_symmetry(symmetry: Mapping[int, int], context: DecisionContext) -> bool:
    """Whether it is a permutation of the live workers that maps all that decides to itself; see the module's text."""
    return _Structure(context).is_kept_by(symmetry)


class _Structure:
    """What a decision is made from, as a graph of workers."""

    def __init__(self, context: DecisionContext) -> None:
        if context.lost:
            raise PlanError(f"workers of the plan are lost already: {context.lost}; decide on that first")
        plan, cluster = context.plan, context.costs.cluster
        self.own: dict[int, tuple[Any, ...]] = {}
        self._host_of = cluster.hosts
        self._on_host: dict[str, list[int]] = defaultdict(list)
        for worker in cluster.workers:
            self._on_host[worker.host].append(worker.id)
            limit, again = context.in_flight_limits.get(worker.id), plan.recompute.get(worker.id)
            self.own[worker.id] = (
                plan.placement.ranges_of(worker.id),
                worker.speed,
                -1 if worker.memory_bytes is None else worker.memory_bytes,
                ()
                if limit is None
                else (limit.in_flight, limit.kept, -1 if limit.deferred is None else limit.deferred),
                () if again is None else (again.start, again.stop),
                plan.splits(worker.id),
            )
        self._ways = Counter(route.hops for route in plan.routes)
        self._on_ways: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, hops in enumerate(self._ways):
            for position, hop in enumerate(hops):
                self._on_ways[hop.worker].append((number, position))

    def is_kept_by(self, symmetry: Mapping[int, int]) -> bool:
        """See `is_symmetry`."""
        if set(symmetry) != set(self.own) or set(symmetry.values()) != set(self.own):
            return False
        if any(self.own[worker] != self.own[other] for worker, other in symmetry.items()):
            return False
        hosts = {(self._host_of[worker], self._host_of[other]) for worker, other in symmetry.items()}
        if len(hosts) > len(self._on_host):
            return False
        return self._ways == {
            tuple(Hop(symmetry[hop.worker], hop.layers) for hop in hops): share for hops, share in self._ways.items()
        }

    def order(self, colours: _Colours, *, first: int) -> list[int]:
        """All workers, `first` told from its like before others are; equal structures are ordered alike mostly."""
        colours = self._told_apart(colours, first)
        while len(set(colours.values())) < len(colours):
            sizes = Counter(colours.values())
            colour = min(colour for colour, size in sizes.items() if size > 1)
            colours = self._told_apart(colours, min(worker for worker in colours if colours[worker] == colour))
        return sorted(colours, key=colours.__getitem__)

    def _told_apart(self, colours: _Colours, worker: int) -> _Colours:
        return self.refined({other: 2 * colour + (other != worker) for other, colour in colours.items()})

    def refined(self, colours: _Colours) -> _Colours:
        """Colours by which workers differ as well if those on their hosts do, or those on their ways."""
        before = 0
        while (different := len(set(colours.values()))) > before:
            before = different
            hosts = {host: sorted(map(colours.__getitem__, on)) for host, on in self._on_host.items()}
            ways = [(share, [(colours[hop.worker], hop.layers) for hop in hops]) for hops, share in self._ways.items()]
            colours = self.ranked(
                {
                    worker: (
                        colour,
                        hosts[self._host_of[worker]],
                        sorted((position, ways[number]) for number, position in self._on_ways[worker]),
                    )
                    for worker, colour in colours.items()
                }
            )
        return colours

    @staticmethod
    def ranked(keys: Mapping[int, Any]) -> _Colours:
        """The rank of each worker's key."""
        ranks: _Colours = {}
        rank, last = -1, None
        for worker in sorted(keys, key=keys.__getitem__):
            if rank < 0 or keys[worker] != last:
                rank, last = rank + 1, keys[worker]
            ranks[worker] = rank
        return ranks
