"""Transportation problems in integers: groups of workers to groups of places at the least cost, with a proof of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from chameleon_ft.schedule.records import Floats, Integers

# Up to this many workers, matching each of them is faster than a linear program over their groups.
_FEW: Final = 400


@dataclass(frozen=True, slots=True)
class Balanced:
    """Supplies that equal the demands in total, int64 [supplies] and [demands], and the cost of one unit between each
    pair, int64 [supplies, demands], zero or more."""

    cost: Integers
    supply: Integers
    demand: Integers

    def min_cost_flow(self) -> Integers:
        """Return the units from each supply to each demand, int64 [supplies, demands], at the least total cost."""
        return self._optimum()[0]

    def fair_flow(self, preferred: Sequence[Sequence[bool]]) -> Integers:
        """Return a flow of least cost whose most expensive unit costs least; of these, one with most `preferred` units.

        A flow costs least if and only if it uses only pairs without slack in an optimal dual. Bisection over the cost
        of the most expensive unit finds which of these pairs are needed.
        """
        flow, from_supply, to_demand = self._optimum()
        tight = self.cost == to_demand[None, :] - from_supply[:, None]
        # Every place has to be taken, and every worker has to go somewhere.
        able = np.where(tight, self.cost, np.iinfo(np.int64).max)
        least = max(able.min(axis=0)[self.demand > 0].max(initial=0), able.min(axis=1)[self.supply > 0].max(initial=0))
        most = self.cost[flow > 0].max(initial=0)
        limits = np.unique(self.cost[tight])
        limits = limits[np.searchsorted(limits, least) : np.searchsorted(limits, most) + 1]

        def is_enough(limit: int) -> bool:
            forbidden = np.where(tight & (self.cost <= limit), 0, 1)
            return not (forbidden * Balanced(forbidden, self.supply, self.demand)._flow()).any()

        # The last of the limits is enough.
        limit = limits[bisect_left(limits, True, hi=len(limits) - 1, key=is_enough)]
        # One forbidden pair costs more than all pairs that are not preferred.
        forbidden = int(self.supply.sum()) + 1
        choice = np.where(tight & (self.cost <= limit), np.where(preferred, 0, 1), forbidden)
        return Balanced(choice, self.supply, self.demand).min_cost_flow()

    def _flow(self) -> Integers:
        return self._by_worker() if int(self.supply.sum()) <= _FEW else self._by_group()

    def _optimum(self) -> tuple[Integers, Integers, Integers]:
        return improved(self.cost, self._flow())

    def _by_worker(self) -> Integers:
        """By matching single units (Jonker and Volgenant 1987), exact while path lengths are below 2^53."""
        # scipy is imported where it is used, because most of the pure part needs none of it.
        from scipy.optimize import linear_sum_assignment

        rows = np.repeat(np.arange(len(self.supply)), self.supply)
        columns = np.repeat(np.arange(len(self.demand)), self.demand)
        chosen, places = linear_sum_assignment(self._scaled()[rows[:, None], columns])
        flow = np.zeros(self.cost.shape, dtype=np.int64)
        np.add.at(flow, (rows[chosen], columns[places]), 1)
        return flow

    def _by_group(self) -> Integers:
        """By the simplex method: the vertices of a transportation problem are integral."""
        from scipy.optimize import linprog
        from scipy.sparse import identity, kron, vstack

        rows, columns = self.cost.shape
        sums = vstack([kron(identity(rows), np.ones((1, columns))), kron(np.ones((1, rows)), identity(columns))])
        units = np.concatenate([self.supply, self.demand])
        # Presolve removes nothing here, and takes many times as long as the rest.
        options = {"presolve": False}
        found = linprog(self._scaled().ravel(), A_eq=sums.tocsc(), b_eq=units, method="highs-ds", options=options)
        flow: Integers = np.rint(found.x).astype(np.int64).reshape(rows, columns)
        assert (flow.sum(axis=1) == self.supply).all()
        assert (flow.sum(axis=0) == self.demand).all()
        return flow

    def _scaled(self) -> Floats:
        """Costs in their greatest common unit: small numbers keep floating point exact."""
        return (self.cost // max(1, int(np.gcd.reduce(self.cost.ravel())))).astype(np.float64)


def improved(cost: Integers, flow: Integers) -> tuple[Integers, Integers, Integers]:
    """Return a flow of least cost, and the shortest distances of supplies and demands in its residual graph.

    A flow costs least when its residual graph has no negative cycle (Klein 1967). Bellman and Ford's method checks that
    in integers, however `flow` was computed, and each cycle found is cancelled.

    Args:
        cost: int64 [supplies, demands], zero or more.
        flow: int64 [supplies, demands], with the right sums.
    """
    flow = flow.copy()
    while True:
        from_supply, to_demand = (np.zeros(count, np.int64) for count in cost.shape)
        before_supply, before_demand = (np.zeros(count, np.int64) for count in cost.shape)
        for _ in range(sum(cost.shape) + 1):
            down = from_supply[:, None] + cost
            nearer = down.min(axis=0) < to_demand
            to_demand[nearer], before_demand[nearer] = down.min(axis=0)[nearer], down.argmin(axis=0)[nearer]
            # Every distance is zero at most, so zero stands for a pair without flow.
            back = np.where(flow > 0, to_demand - cost, 0)
            closer = back.min(axis=1) < from_supply
            if not closer.any():
                return flow, from_supply, to_demand
            from_supply[closer], before_supply[closer] = back.min(axis=1)[closer], back.argmin(axis=1)[closer]
        # A distance that still shrinks comes from a negative cycle: go back far enough to be on it, then once round.
        supply = closer.argmax()
        for _ in cost:
            supply = before_demand[before_supply[supply]]
        cycle = [supply]
        while (supply := before_demand[before_supply[supply]]) != cycle[0]:
            cycle.append(supply)
        demands = before_supply[cycle]
        units = flow[cycle, demands].min()
        flow[cycle, demands] -= units
        flow[before_demand[demands], demands] += units
