"""From a network to the order of each worker's operations, and from those orders to a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Final

import numpy as np

from chameleon_ft.plan.plan import Plan, Route
from chameleon_ft.schedule._components import different_ways
from chameleon_ft.schedule._engine import Rules, Schedule, replayed, run
from chameleon_ft.schedule._network import Network
from chameleon_ft.schedule._records import Integers
from chameleon_ft.schedule.program import Operation, OperationKind, Program

# The constructor's arguments after the first two, in its order.
_all_but_kind_and_micro_batch: Final = attrgetter(*(field.name for field in fields(Operation)[2:]))


def schedule(network: Network, rules: Rules, ways: Integers | None = None) -> Schedule:
    """The engine's schedule under `rules`; at a dead end, with only gradients run ahead; then under smaller limits; in
    the end, one that cannot get stuck.

    Dead ends are met where routes share workers in many ways, or when a worker comes more than once in the order of the
    layers. `ways` are the first slots of the routes, the one that goes first first; `ways_by_place` unless given.
    """
    if ways is None:
        ways = network.ways_by_place()
    dead_end = False
    while True:
        for gradients_only in sorted({rules.gradients_only, True}):
            found = run(network, replace(rules, gradients_only=gradients_only), ways)
            if found is not None:
                return replace(found, dead_end=dead_end) if dead_end else found
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
    phases = range(3 if split_backward else 2)
    by_code = [Operation(kinds[phase], micro_batch, *own[phase]) for phase in phases for micro_batch, own in slots]
    return [tuple(map(by_code.__getitem__, order)) for order in orders]


def _one_by_one(network: Network) -> Schedule:
    """One micro-batch after the other through all its operations: slow, but it cannot get stuck."""
    count = len(network.slots)
    workers = network.slots["worker"].tolist()
    orders: list[list[int]] = [[] for _ in network.workers]
    for start, stop in pairwise([*network.ways.tolist(), count]):
        for slot in range(start, stop):
            orders[workers[slot]].append(slot)
        for slot in reversed(range(start, stop)):
            orders[workers[slot]].append(count + slot)
            if network.split_backward:
                orders[workers[slot]].append(2 * count + slot)
    return replayed(network, np.array([code for order in orders for code in order]))
