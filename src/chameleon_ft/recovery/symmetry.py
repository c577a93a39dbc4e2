"""Symmetries of a plan on its cluster, the classes of losses that they make equivalent, and decisions for a class.

A symmetry is a permutation of the live workers that preserves everything that decides: the layers and limits of each
worker, its speed and memory, which workers share a host, and how many micro-batches take each route. Times of
operations, messages, reductions and transfers depend on nothing else. So if a symmetry maps worker a to worker b, then
the best plan after the loss of a, with all workers mapped, can run after the loss of b, and takes as long. The numbers
of the micro-batches on a route do not matter, because all micro-batches are alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.context import Course, DecisionContext
from chameleon_ft.recovery.decision import Decision, decide
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.schedule import CostModel
from chameleon_ft.transfer import Message, Transfer, remap_placement, remap_plan

_Colours: TypeAlias = dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossClass:
    """Equivalent losses, each of a single worker, or each of a host with all its workers.

    Attributes:
        lost: the workers of the representative loss, ascending.
        symmetries: for the workers of each loss, a symmetry that maps `lost` to them: worker -> worker, for all live
            ones.
        of_hosts: True if each loss is that of a host.
    """

    lost: tuple[int, ...]
    symmetries: Mapping[frozenset[int], Mapping[int, int]]
    of_hosts: bool = False


def loss_classes(context: DecisionContext) -> tuple[LossClass, ...]:
    """Return the live workers of the plan in classes, ascending by their representatives, the lowest worker of each.

    Every symmetry is checked, so the losses in a class are equivalent. Losses in different classes may be so too:
    symmetries are searched for by colour refinement, which can miss one if a plan is very regular.

    Raises:
        PlanError: a worker of the plan is lost already.
    """
    structure = _Structure(context)
    colours = structure.refined(_ranked(structure.attributes))
    orders = {worker: structure.order(colours, first=worker) for worker in context.plan.workers}
    classes: dict[int, dict[frozenset[int], Mapping[int, int]]] = {}
    for worker, order in orders.items():
        for representative, symmetries in classes.items():
            if colours[representative] == colours[worker]:
                symmetry = FrozenMap(dict(zip(orders[representative], order, strict=True)))
                if structure.is_preserved_by(symmetry):
                    symmetries[frozenset([worker])] = symmetry
                    break
        else:
            classes[worker] = {frozenset([worker]): FrozenMap({each: each for each in context.live})}
    return tuple(LossClass(lost=(worker,), symmetries=FrozenMap(found)) for worker, found in classes.items())


def host_loss_classes(context: DecisionContext, classes: Iterable[LossClass]) -> tuple[LossClass, ...]:
    """Return the classes of hosts with two live workers or more, without whose workers all layers still have holders.

    A symmetry maps hosts to hosts. So if workers of two hosts are in the same of the `classes` of this context, the
    losses of these hosts are equivalent.
    """
    hosts = context.costs.cluster.hosts
    on_host: dict[str, list[int]] = defaultdict(list)
    for worker in context.live:
        on_host[hosts[worker]].append(worker)
    found: list[LossClass] = []
    classified: set[str] = set()
    for each in classes:
        lost = on_host[hosts[each.lost[0]]]
        if hosts[lost[0]] in classified or len(lost) == 1:
            continue
        symmetries: dict[frozenset[int], Mapping[int, int]] = {}
        for (worker,), symmetry in each.symmetries.items():
            classified.add(hosts[worker])
            symmetries.setdefault(frozenset(on_host[hosts[worker]]), symmetry)
        if not context.placement.without(lost).unheld_layers:
            found.append(LossClass(lost=tuple(lost), symmetries=FrozenMap(symmetries), of_hosts=True))
    return tuple(found)


def classes_to_prepare(context: DecisionContext) -> tuple[list[LossClass], list[LossClass]]:
    """Return the classes of single workers and those of hosts, the largest first: the order to prepare decisions in."""
    of_workers = loss_classes(context)
    of_hosts = host_loss_classes(context, of_workers)
    by_size = [sorted(classes, key=lambda each: -len(each.symmetries)) for classes in (of_workers, of_hosts)]
    return by_size[0], by_size[1]


def decide_for_class(
    losses: LossClass, context: DecisionContext, policy: str, failures: FailureModel
) -> Decision | None:
    """Return the decision after the representative loss of a class; None if no worker is left.

    Args:
        losses: the class.
        context: the context without a lost worker; its `repeat_s` is the expected repeated work of a loss.
        policy: name of one of `POLICIES`.
        failures: the present failure model; the loss is counted on top of it.
    """
    costs = context.costs
    left = CostModel(costs.workload, costs.cluster.without(losses.lost))
    if not left.cluster.workers:
        return None
    counted = failures.observed(failures=1, host_failures=int(losses.of_hosts))
    return decide(replace(context, costs=left), policy, counted)


def remap_decision(decision: Decision, symmetry: Mapping[int, int]) -> Decision:
    """Return the decision after another loss of a class, by mapping the workers of the representative decision."""
    course = decision.course
    if course is None or all(worker == other for worker, other in symmetry.items()):
        return decision
    remapped = Course(
        plan=remap_plan(course.plan, symmetry),
        in_flight_limits=FrozenMap({symmetry[worker]: limit for worker, limit in course.in_flight_limits.items()}),
        program=course.program.remap_workers(symmetry),
        transfer=None if course.transfer is None else _remap_transfer(course.transfer, symmetry),
    )
    return replace(decision, course=remapped)


def _remap_transfer(transfer: Transfer, symmetry: Mapping[int, int]) -> Transfer:
    return replace(
        transfer,
        placement=remap_placement(transfer.placement, symmetry),
        roles={symmetry[place]: symmetry[worker] for place, worker in transfer.roles.items()},
        rounds=tuple(
            tuple(
                Message(symmetry[each.source], symmetry[each.destination], each.layers, each.num_bytes)
                for each in messages
            )
            for messages in transfer.rounds
        ),
    )


class _Structure:
    """Everything that decides, as a graph of workers.

    Attributes:
        attributes: the facts of each live worker that concern no other worker, as a tuple that can be ordered.
    """

    def __init__(self, context: DecisionContext) -> None:
        if context.lost:
            raise PlanError(f"workers of the plan are lost already: {context.lost}; decide on that first")
        plan, cluster = context.plan, context.costs.cluster
        self._host_of = cluster.hosts
        self._on_host: dict[str, list[int]] = defaultdict(list)
        self.attributes: dict[int, tuple[Any, ...]] = {}
        for worker in cluster.workers:
            self._on_host[worker.host].append(worker.id)
            limit, recomputed = context.in_flight_limits.get(worker.id), plan.recompute.get(worker.id)
            self.attributes[worker.id] = (
                plan.placement.ranges_of(worker.id),
                worker.speed,
                worker.memory_bytes or -1,
                (limit.in_flight, limit.kept, -1 if limit.deferred is None else limit.deferred) if limit else (),
                (recomputed.start, recomputed.stop, recomputed.num_selective) if recomputed else (),
                plan.splits(worker.id),
            )
        # The hops of each route -> its micro-batches; and of each worker, (number of the route, position in it).
        self._routes = Counter(route.hops for route in plan.routes)
        self._positions: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, hops in enumerate(self._routes):
            for position, hop in enumerate(hops):
                self._positions[hop.worker].append((number, position))

    def is_preserved_by(self, symmetry: Mapping[int, int]) -> bool:
        """Return whether a mapping is a permutation of the live workers that preserves everything that decides."""
        if set(symmetry) != set(self.attributes) or set(symmetry.values()) != set(self.attributes):
            return False
        if any(self.attributes[worker] != self.attributes[other] for worker, other in symmetry.items()):
            return False
        hosts = {(self._host_of[worker], self._host_of[other]) for worker, other in symmetry.items()}
        return len(hosts) == len(self._on_host) and self._routes == {
            tuple(Hop(symmetry[hop.worker], hop.layers) for hop in hops): count for hops, count in self._routes.items()
        }

    def order(self, colours: _Colours, *, first: int) -> list[int]:
        """Return all workers in an order that equal structures usually share, individualizing `first`.

        Each round gives one worker of a colour with several a colour of its own, and refines.
        """
        colours = self._individualized(colours, first)
        while len(set(colours.values())) < len(colours):
            sizes = Counter(colours.values())
            colour = min(colour for colour, size in sizes.items() if size > 1)
            colours = self._individualized(colours, min(worker for worker in colours if colours[worker] == colour))
        return sorted(colours, key=colours.__getitem__)

    def _individualized(self, colours: _Colours, worker: int) -> _Colours:
        return self.refined({other: 2 * colour + (other != worker) for other, colour in colours.items()})

    def refined(self, colours: _Colours) -> _Colours:
        """Return colours that also differ if those of the workers on the same host, or on the same routes, differ.

        This is colour refinement (the Weisfeiler-Leman algorithm in one dimension), up to its fixed point.
        """
        before = 0
        while (different := len(set(colours.values()))) > before:
            before = different
            hosts = {host: sorted(colours[each] for each in on_host) for host, on_host in self._on_host.items()}
            routes = [
                (count, [(colours[hop.worker], hop.layers) for hop in hops]) for hops, count in self._routes.items()
            ]
            colours = _ranked(
                {
                    worker: (
                        colour,
                        hosts[self._host_of[worker]],
                        sorted((position, routes[number]) for number, position in self._positions[worker]),
                    )
                    for worker, colour in colours.items()
                }
            )
        return colours


def _ranked(keys: Mapping[int, Any]) -> _Colours:
    """Return the rank of each worker's key; equal keys have equal ranks."""
    ranks: _Colours = {}
    ascending = sorted(keys, key=keys.__getitem__)
    for before, worker in zip([None, *ascending], ascending, strict=False):
        ranks[worker] = 0 if before is None else ranks[before] + (keys[worker] != keys[before])
    return ranks
