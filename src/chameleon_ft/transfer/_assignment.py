"""Transportation problems in integers: groups of workers to groups of places at the least cost, and proof of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]
    Booleans: TypeAlias = NDArray[np.bool_]

# Up to so many workers, matching each of them is faster than a linear program over their groups.
_FEW: Final = 400


@dataclass(frozen=True, slots=True)
class Balanced:
    """Supplies that equal the demands in total, and what one unit costs: [supplies, demands]."""

    cost: Integers
    supply: Integers
    demand: Integers

    def least_cost_flow(self) -> Integers:
        """Units from each supply to each demand, at the least cost in total."""
        return self._optimum()[0]

    def fair_flow(self, preferred: Sequence[Sequence[bool]]) -> Integers:
        """Of the flows of least cost, those whose dearest unit costs least; of these, one with most `preferred` units.

        A flow costs least if and only if it keeps to the pairs that an optimal dual leaves no slack. Which of these
        are needed is found by bisection over the cost of the dearest.
        """
        import numpy as np

        flow, from_supply, to_demand = self._optimum()
        tight = self.cost == to_demand[None, :] - from_supply[:, None]
        limits = np.unique(self.cost[tight])
        # Each place has to be taken by somebody, and each worker has to go somewhere.
        able = np.where(tight, self.cost, np.iinfo(np.int64).max)
        least = max(able.min(axis=0)[self.demand > 0].max(initial=0), able.min(axis=1)[self.supply > 0].max(initial=0))
        low, high = (int(np.searchsorted(limits, cost)) for cost in (least, self.cost[flow > 0].max(initial=0)))
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(tight & (self.cost <= limits[middle])):
                high = middle
            else:
                low = middle + 1
        allowed = tight & (self.cost <= limits[low])
        # One forbidden pair is dearer than all pairs that are not preferred.
        forbidden = int(self.supply.sum()) + 1
        choice = np.where(allowed, np.where(preferred, 0, 1), forbidden)
        return Balanced(choice, self.supply, self.demand).least_cost_flow()

    def _optimum(self) -> tuple[Integers, Integers, Integers]:
        flow = self._by_worker() if int(self.supply.sum()) <= _FEW else self._by_group()
        return improved(self.cost, flow)

    def _by_worker(self) -> Integers:
        """By matching single units (Jonker and Volgenant 1987), exact while path lengths are below 2^53."""
        import numpy as np
        from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

        rows = np.repeat(np.arange(len(self.supply)), self.supply)
        columns = np.repeat(np.arange(len(self.demand)), self.demand)
        chosen, places = linear_sum_assignment(self._scaled()[np.ix_(rows, columns)])
        flow = np.zeros(self.cost.shape, dtype=np.int64)
        np.add.at(flow, (rows[chosen], columns[places]), 1)
        return flow

    def _by_group(self) -> Integers:
        """By the simplex method: the vertices of a transportation problem are integral."""
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import identity, kron, vstack  # type: ignore[import-untyped]

        rows, columns = self.cost.shape
        sums = vstack([kron(identity(rows), np.ones((1, columns))), kron(np.ones((1, rows)), identity(columns))])
        units = np.concatenate([self.supply, self.demand])
        # Presolve finds nothing to take away here, and takes many times as long as the rest.
        options = {"presolve": False}
        found = linprog(self._scaled().ravel(), A_eq=sums.tocsc(), b_eq=units, method="highs-ds", options=options)
        flow: Integers = np.rint(found.x).astype(np.int64).reshape(rows, columns)
        assert (flow.sum(axis=1) == self.supply).all()
        assert (flow.sum(axis=0) == self.demand).all()
        return flow

    def _scaled(self) -> NDArray[np.float64]:
        """Costs in their greatest common unit: small numbers keep floating point exact."""
        import numpy as np

        return (self.cost // max(1, int(np.gcd.reduce(self.cost.ravel())))).astype(np.float64)

    def _is_enough(self, allowed: Booleans) -> bool:
        """Whether the allowed pairs can carry everything."""
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow  # type: ignore[import-untyped]

        rows, columns = self.cost.shape
        sink = rows + columns + 1
        capacity = np.zeros((sink + 1, sink + 1), dtype=np.int32)
        capacity[0, 1 : rows + 1] = self.supply
        capacity[1 : rows + 1, rows + 1 : sink] = np.where(allowed, self.supply[:, None], 0)
        capacity[rows + 1 : sink, sink] = self.demand
        return int(maximum_flow(csr_array(capacity), 0, sink).flow_value) == int(self.supply.sum())


def improved(cost: Integers, flow: Integers) -> tuple[Integers, Integers, Integers]:
    """`flow` made one of least cost, and the shortest distances of supplies and demands in its residual graph.

    A flow costs least when its residual graph has no negative cycle (Klein 1967), which Bellman and Ford's method
    finds out in integers, whatever `flow` was computed with. Each cycle found is cancelled.

    Args:
        cost: [supplies, demands].
        flow: [supplies, demands], with the right sums.
    """
    import numpy as np

    rows, columns = cost.shape
    flow = flow.copy()
    while True:
        from_supply, to_demand = np.zeros(rows, dtype=np.int64), np.zeros(columns, dtype=np.int64)
        before_supply, before_demand = np.full(rows, -1), np.full(columns, -1)
        for _ in range(rows + columns + 1):
            onward = from_supply[:, None] + cost
            nearest = onward.argmin(axis=0)
            length = onward[nearest, np.arange(columns)]
            nearer = length < to_demand
            to_demand[nearer], before_demand[nearer] = length[nearer], nearest[nearer]
            back = np.where(flow > 0, to_demand[None, :] - cost, np.iinfo(np.int64).max)
            nearest = back.argmin(axis=1)
            length = back[np.arange(rows), nearest]
            closer = length < from_supply
            from_supply[closer], before_supply[closer] = length[closer], nearest[closer]
            if not closer.any():
                return flow, from_supply, to_demand
        _cancel(flow, before_supply, before_demand, int(closer.argmax()))


def _cancel(flow: Integers, before_supply: Integers, before_demand: Integers, supply: int) -> None:
    """Sends as much as goes round the cycle that the way back from `supply` ends in."""
    for _ in range(len(before_supply)):
        supply = int(before_demand[before_supply[supply]])
    less: list[tuple[int, int]] = []
    more: list[tuple[int, int]] = []
    while not less or supply != less[0][0]:
        demand = int(before_supply[supply])
        less.append((supply, demand))
        supply = int(before_demand[demand])
        more.append((supply, demand))
    units = min(flow[pair] for pair in less)
    for pair in less:
        flow[pair] -= units
    for pair in more:
        flow[pair] += units
