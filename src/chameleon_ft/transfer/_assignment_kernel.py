"""The inner loops of `transfer._assignment`, compiled by numba: flows between groups, and paths in residual graphs."""

from __future__ import annotations

import numpy as np

from chameleon_ft.schedule.jit import kernel
from chameleon_ft.schedule.records import Booleans, Integers


@kernel
def least_cost(cost: Integers, flow: Integers) -> tuple[Integers, Integers]:
    """Make `flow` one of least cost: shortest distances by Bellman and Ford, cancelling each negative cycle.

    Returns:
        The shortest distances of supplies and demands in the residual graph.
    """
    rows, columns = cost.shape
    while True:
        from_supply, to_demand = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
        before_supply, before_demand = np.full(rows, -1), np.full(columns, -1)
        closer = -1
        for _ in range(rows + columns + 1):
            for demand in range(columns):
                nearest = 0
                for supply in range(1, rows):
                    if from_supply[supply] + cost[supply, demand] < from_supply[nearest] + cost[nearest, demand]:
                        nearest = supply
                if from_supply[nearest] + cost[nearest, demand] < to_demand[demand]:
                    to_demand[demand] = from_supply[nearest] + cost[nearest, demand]
                    before_demand[demand] = nearest
            closer = -1
            for supply in range(rows):
                nearest = -1
                for demand in range(columns):
                    if flow[supply, demand] > 0 and (
                        nearest < 0
                        or to_demand[demand] - cost[supply, demand] < to_demand[nearest] - cost[supply, nearest]
                    ):
                        nearest = demand
                if nearest >= 0 and to_demand[nearest] - cost[supply, nearest] < from_supply[supply]:
                    from_supply[supply] = to_demand[nearest] - cost[supply, nearest]
                    before_supply[supply] = nearest
                    if closer < 0:
                        closer = supply
            if closer < 0:
                return from_supply, to_demand
        _cancel(flow, before_supply, before_demand, closer)


@kernel
def _cancel(flow: Integers, before_supply: Integers, before_demand: Integers, supply: int) -> None:
    """Sends as much as goes round the cycle that the way back from `supply` ends in."""
    for _ in range(len(before_supply)):
        supply = before_demand[before_supply[supply]]
    first, units = supply, flow[supply, before_supply[supply]]
    while True:
        demand = before_supply[supply]
        units = min(units, flow[supply, demand])
        supply = before_demand[demand]
        if supply == first:
            break
    while True:
        demand = before_supply[supply]
        flow[supply, demand] -= units
        supply = before_demand[demand]
        flow[supply, demand] += units
        if supply == first:
            break


@kernel
def least_dearest(cost: Integers, allowed: Booleans, flow: Integers, limits: Integers) -> int:
    """The least of `limits` that the cost of the dearest unit can have.

    Args:
        cost: [supplies, demands].
        allowed: the pairs that may be used; with the last of `limits` they can carry everything.
        flow: one that carries everything.
        limits: ascending.
    """
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_enough(cost, allowed, flow, limits[middle]):
            high = middle
        else:
            low = middle + 1
    least: int = limits[low]
    return least


@kernel
def _is_enough(cost: Integers, allowed: Booleans, flow: Integers, limit: int) -> bool:
    """Whether the allowed pairs that are no dearer can carry it all: by augmenting paths, from what is in `flow`."""
    rows, columns = cost.shape
    left, room = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    carried = np.zeros((rows, columns), np.int64)
    for supply in range(rows):
        for demand in range(columns):
            if allowed[supply, demand] and cost[supply, demand] <= limit:
                carried[supply, demand] = flow[supply, demand]
            else:
                left[supply] += flow[supply, demand]
                room[demand] += flow[supply, demand]
    before, queue = np.empty(columns, np.int64), np.empty(rows, np.int64)
    came = np.empty(rows, np.int64)
    for supply in range(rows):
        while left[supply] > 0:
            end = _path(cost, allowed, limit, carried, room, supply, before, came, queue)
            if end < 0:
                return False
            units = min(left[supply], room[end])
            demand = end
            while before[demand] != supply:
                units = min(units, carried[before[demand], came[before[demand]]])
                demand = came[before[demand]]
            room[end] -= units
            left[supply] -= units
            demand = end
            while True:
                giver = before[demand]
                carried[giver, demand] += units
                if giver == supply:
                    break
                demand = came[giver]
                carried[giver, demand] -= units
    return True


@kernel
def _path(
    cost: Integers,
    allowed: Booleans,
    limit: int,
    carried: Integers,
    room: Integers,
    start: int,
    before: Integers,
    came: Integers,
    queue: Integers,
) -> int:
    """A demand with room at the end of a shortest augmenting path from the supply `start`, or -1.

    `before` are the supplies before demands, and `came` the demands before supplies, on the way there.
    """
    before[:] = -1
    came[:] = -1
    queue[0] = start
    begin, end = 0, 1
    while begin < end:
        supply = queue[begin]
        begin += 1
        for demand in range(cost.shape[1]):
            if before[demand] >= 0 or not allowed[supply, demand] or cost[supply, demand] > limit:
                continue
            before[demand] = supply
            if room[demand] > 0:
                return demand
            for other in range(cost.shape[0]):
                if other != start and came[other] < 0 and carried[other, demand] > 0:
                    came[other] = demand
                    queue[end] = other
                    end += 1
    return -1
