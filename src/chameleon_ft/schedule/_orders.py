"""From a network to the order of each worker's operations, and from those orders to a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._engine import Engine, Rules, Schedule
from chameleon_ft.schedule._network import Network
from chameleon_ft.schedule.program import Operation, OperationKind, Program


def schedule(network: Network, rules: Rules, ways: Sequence[range] | None = None) -> Schedule:
    """The engine's schedule under `rules`; at a dead end, under smaller limits; in the end, one that cannot get stuck.

    Dead ends are rare, and only met when a worker comes more than once in the order of the layers: several ranges.
    `ways` are the slots of each route, the one that goes first first; `ways_by_place` unless given.
    """
    rank = [0] * len(network.slots.worker)
    for place, way in enumerate(ways_by_place(network) if ways is None else ways):
        for slot in way:
            rank[slot] = place
    while True:
        found = _faster_of_both_ways(network, rules, rank)
        if found is not None:
            return found
        if max(rules.in_flight) == 1:
            return _one_by_one(network)
        rules = replace(rules, in_flight=tuple(max(1, limit // 2) for limit in rules.in_flight))


def _faster_of_both_ways(network: Network, rules: Rules, rank: list[int]) -> Schedule | None:
    """With and without running activations ahead of full channels; the second only when the first was strained."""
    free = Engine(network, rules, rank).run()
    if free is not None and not free.strained:
        return free
    careful = Engine(network, replace(rules, gradients_only=True), rank).run()
    candidates = [found for found in (free, careful) if found is not None]
    return min(candidates, key=lambda found: (found.beyond_limits, found.step_s), default=None)


def build_program(plan: Plan, orders: list[list[int]]) -> Program:
    """The program whose operations have these codes, by worker in ascending order of ids."""
    backward = OperationKind.INPUT_GRAD if plan.split_backward else OperationKind.BACKWARD
    kinds = (OperationKind.FORWARD, backward, OperationKind.WEIGHT_GRAD)
    slots = [(route, position) for route in plan.routes for position in range(len(route.hops))]
    count = len(slots)
    operations: dict[int, tuple[Operation, ...]] = {}
    for worker, order in zip(plan.workers, orders, strict=True):
        own: list[Operation] = []
        for code in order:
            phase, slot = divmod(code, count)
            route, position = slots[slot]
            own.append(Operation.of(kinds[phase], route, position))
        operations[worker] = tuple(own)
    return Program(operations)


def ways_by_place(network: Network) -> list[range]:
    """The slots of each route, by the place of its micro-batch in its own pipeline; of equals the lower one first."""
    slots = network.slots
    load = [0] * len(network.workers)
    place: list[int] = []
    for worker in slots.worker:
        place.append(load[worker])
        load[worker] += 1
    ways: list[tuple[int, range]] = []
    first = 0
    for slot, last in enumerate(slots.last):
        if last:
            way = range(first, slot + 1)
            # A worker that helps out has more to do than those that do not, so the shortest list on a route is that of
            # its own pipeline, and the place in it is the micro-batch's place in the pipeline.
            home = min(way, key=lambda s: load[slots.worker[s]])
            ways.append((place[home], way))
            first = slot + 1
    return [way for _, way in sorted(ways, key=lambda ranked: ranked[0])]


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
    return Schedule(orders=orders, step_s=network.step_s(orders), strained=True)
