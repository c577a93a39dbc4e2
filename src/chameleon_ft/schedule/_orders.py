"""From a network to the order of each worker's operations, and from those orders to a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from chameleon_ft.plan.plan import Plan, Route
from chameleon_ft.schedule._components import different_ways
from chameleon_ft.schedule._engine import Rules, Schedule, replayed, run
from chameleon_ft.schedule._network import Network
from chameleon_ft.schedule._records import Integers, Records
from chameleon_ft.schedule.program import Operation, OperationKind, Program, records_from


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


def build_program(plan: Plan, orders: Iterable[Integers]) -> Program:
    """The program whose operations have these codes, by worker in ascending order of ids."""
    by_code = records_by_code(plan.routes, split_backward=plan.split_backward, recompute=plan.recompute)
    return Program.of_records(dict(zip(plan.workers, map(by_code.__getitem__, orders), strict=True)))


def records_by_code(routes: Sequence[Route], *, split_backward: bool, recompute: frozenset[int]) -> Records:
    """The operations of these routes by their codes, as an array of `PROGRAM_RECORD`."""
    kinds = kinds_by_phase(split_backward=split_backward)
    ways, taken = different_ways(route.hops for route in routes)
    # What the operations of a hop have in common, whatever their micro-batch: by phase, and way after way by hop.
    common = [
        records_from(Operation.of(kind, Route(0, hops), hop, recompute) for hops in ways for hop in range(len(hops)))
        for kind in kinds
    ]
    lengths = np.array([len(hops) for hops in ways])
    begins = np.cumsum(lengths) - lengths
    way = np.array(taken)
    hops_of_route = lengths[way]
    before = np.cumsum(hops_of_route) - hops_of_route
    slots = np.arange(hops_of_route.sum()) + np.repeat(begins[way] - before, hops_of_route)
    records = np.concatenate([own[slots] for own in common])
    records["micro_batch"] = np.tile(np.repeat([route.micro_batch for route in routes], hops_of_route), len(kinds))
    return records


def kinds_by_phase(*, split_backward: bool) -> tuple[OperationKind, ...]:
    """What an operation of each phase computes: codes are numbers of slots, phase after phase."""
    if split_backward:
        return OperationKind.FORWARD, OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD
    return OperationKind.FORWARD, OperationKind.BACKWARD


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
