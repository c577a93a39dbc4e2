"""From a network to the order of each worker's operations, and from those orders to a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Final

from chameleon_ft.plan.plan import Plan, Route
from chameleon_ft.schedule._components import different_ways
from chameleon_ft.schedule._engine import Engine, Rules, Schedule
from chameleon_ft.schedule._network import Network
from chameleon_ft.schedule.program import Operation, OperationKind, Program

# The constructor's arguments after the first two, in its order.
_all_but_kind_and_micro_batch: Final = attrgetter(*(field.name for field in fields(Operation)[2:]))


def schedule(network: Network, rules: Rules, ways: Sequence[range] | None = None) -> Schedule:
    """The engine's schedule under `rules`; at a dead end, with only gradients run ahead; then under smaller limits; in
    the end, one that cannot get stuck.

    Dead ends are met where routes share workers in many ways, or when a worker comes more than once in the order of the
    layers. `ways` are the slots of each route, the one that goes first first; `ways_by_place` unless given.
    """
    rank = [0] * len(network.slots.worker)
    for place, way in enumerate(ways_by_place(network) if ways is None else ways):
        for slot in way:
            rank[slot] = place
    dead_end = False
    while True:
        for gradients_only in sorted({rules.gradients_only, True}):
            found = Engine(network, replace(rules, gradients_only=gradients_only), rank).run()
            if found is not None:
                return replace(found, dead_end=dead_end)
            dead_end = True
        if max(rules.in_flight) == 1:
            return replace(_one_by_one(network), dead_end=dead_end)
        rules = replace(rules, in_flight=tuple(max(1, limit // 2) for limit in rules.in_flight))


def build_program(plan: Plan, orders: list[list[int]]) -> Program:
    """The program whose operations have these codes, by worker in ascending order of ids."""
    operations = operations_of(plan.routes, orders, split_backward=plan.split_backward, recompute=plan.recompute)
    return Program(dict(zip(plan.workers, operations, strict=True)))


def operations_of(
    routes: Sequence[Route], orders: Sequence[Sequence[int]], *, split_backward: bool, recompute: frozenset[int]
) -> list[tuple[Operation, ...]]:
    """For each list of codes the operations that have them, where slots are those of `routes`."""
    backward = OperationKind.INPUT_GRAD if split_backward else OperationKind.BACKWARD
    kinds = (OperationKind.FORWARD, backward, OperationKind.WEIGHT_GRAD)
    ways, taken = different_ways(route.hops for route in routes)
    # What the operations of a hop have in common, whatever their micro-batch, by way, hop and phase.
    common = [
        [
            tuple(_all_but_kind_and_micro_batch(Operation.of(kind, Route(0, hops), hop, recompute)) for kind in kinds)
            for hop in range(len(hops))
        ]
        for hops in ways
    ]
    slots = [(route.micro_batch, own) for route, way in zip(routes, taken, strict=True) for own in common[way]]
    count = len(slots)
    found: list[tuple[Operation, ...]] = []
    for order in orders:
        operations: list[Operation] = []
        for code in order:
            phase, slot = divmod(code, count)
            micro_batch, own = slots[slot]
            operations.append(Operation(kinds[phase], micro_batch, *own[phase]))
        found.append(tuple(operations))
    return found


def ways_by_place(network: Network) -> list[range]:
    """The slots of each route, by the place of its micro-batch in its own pipeline.

    Of equals those go first that few others go along with: detours, which are the first to come too late for somebody.
    """
    slots = network.slots
    load = [0] * len(network.workers)
    place: list[int] = []
    for worker in slots.worker:
        place.append(load[worker])
        load[worker] += 1
    ways: list[tuple[int, tuple[int, ...], range]] = []
    first = 0
    for slot, last in enumerate(slots.last):
        if last:
            way = range(first, slot + 1)
            # A worker that helps out has more to do than those that do not, so the shortest list on a route is that of
            # its own pipeline, and the place in it is the micro-batch's place in the pipeline.
            home = min(way, key=lambda s: load[slots.worker[s]])
            ways.append((place[home], tuple(slots.worker[first : slot + 1]), way))
            first = slot + 1
    company = Counter(workers for _, workers, _ in ways)
    return [way for _, _, way in sorted(ways, key=lambda ranked: (ranked[0], company[ranked[1]]))]


def _one_by_one(network: Network) -> Schedule:
    """One micro-batch after the other through all its operations: slow, but it cannot get stuck."""
    slots = network.slots
    count = len(slots.worker)
    orders: list[list[int]] = [[] for _ in network.workers]
    first = 0
    for slot in range(count):
        if slots.last[slot]:
            hops = range(first, slot + 1)
            for hop in hops:
                orders[slots.worker[hop]].append(hop)
            for hop in reversed(hops):
                orders[slots.worker[hop]].append(count + hop)
                if network.split_backward:
                    orders[slots.worker[hop]].append(2 * count + hop)
            first = slot + 1
    return Schedule(orders=orders, step_s=network.step_s(orders))
