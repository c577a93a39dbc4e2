from __future__ import annotations

from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._engine import Engine, Rules, Schedule
from chameleon_ft.schedule._network import Network
from chameleon_ft.schedule.program import Operation, OperationKind, Program


def build_program(plan: Plan, orders: list[list[int]]) -> Program:
    """The program whose operations have these codes, by worker in ascending order of ids."""
    slots = [(route, position) for route in plan.routes for position in range(len(route.hops))]
    count = len(slots)
    backward = OperationKind.INPUT_GRAD if plan.split_backward else OperationKind.BACKWARD
    kinds = (OperationKind.FORWARD, backward, OperationKind.WEIGHT_GRAD)
    operations: dict[int, tuple[Operation, ...]] = {}
    for worker, order in zip(plan.workers, orders, strict=True):
        own: list[Operation] = []
        for code in order:
            phase, slot = divmod(code, count)
            route, position = slots[slot]
            hops = route.hops
            before = hops[position - 1].worker if position else None
            after = hops[position + 1].worker if position + 1 < len(hops) else None
            before = None if before == worker else before
            after = None if after == worker else after
            receive_from, send_to = ((before, after), (after, before), (None, None))[phase]
            own.append(
                Operation(
                    kinds[phase],
                    route.micro_batch,
                    position,
                    hops[position].layers,
                    receive_from,
                    send_to,
                    position == 0,
                    position + 1 == len(hops),
                )
            )
        operations[worker] = tuple(own)
    return Program(operations)


def run(network: Network, rules: Rules, rank: list[int]) -> Schedule:
    for gradients_only in (False, True):
        found = Engine(network, rules, rank, gradients_only=gradients_only).run()
        if found is not None:
            return found
    return Schedule(one_by_one(network), float("inf"))


def one_by_one(network: Network) -> list[list[int]]:
    """Orders that pass one micro-batch after the other through all its operations: slow, but never stuck."""
    slots = network.slots
    count = len(slots.worker)
    orders: list[list[int]] = [[] for _ in network.workers]
    first = 0
    for slot, last in enumerate(slots.last):
        if last:
            for s in range(first, slot + 1):
                orders[slots.worker[s]].append(s)
            for s in range(slot, first - 1, -1):
                orders[slots.worker[s]].append(count + s)
                if network.split_backward:
                    orders[slots.worker[s]].append(2 * count + s)
            first = slot + 1
    return orders


def ranks(network: Network) -> list[int]:
    """For each slot the place of its micro-batch in its own pipeline, then its number."""
    owner = network.slots.worker
    load = [0] * len(network.workers)
    place: list[int] = []
    for worker in owner:
        place.append(load[worker])
        load[worker] += 1
    # A worker that helps out has a longer list than those that do not, so the shortest list on a route is its own
    # pipeline's, and the place in that list is the micro-batch's place in its pipeline.
    n = len(place)
    result: list[int] = []
    start = 0
    for slot in range(n):
        if network.slots.last[slot]:
            home = min(range(start, slot + 1), key=lambda s: load[owner[s]])
            result += [place[home] * n + start] * (slot + 1 - start)
            start = slot + 1
    return result
