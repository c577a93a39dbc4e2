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

        # Here, as below, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.transfer._assignment_kernel import least_dearest

        flow, from_supply, to_demand = self._optimum()
        tight = self.cost == to_demand[None, :] - from_supply[:, None]
        limits = np.unique(self.cost[tight])
        # Each place has to be taken by somebody, and each worker has to go somewhere.
        able = np.where(tight, self.cost, np.iinfo(np.int64).max)
        least = max(able.min(axis=0)[self.demand > 0].max(initial=0), able.min(axis=1)[self.supply > 0].max(initial=0))
        most = self.cost[flow > 0].max(initial=0)
        between = limits[np.searchsorted(limits, least) : np.searchsorted(limits, most) + 1]
        allowed = tight & (self.cost <= least_dearest(self.cost, tight, flow, between))
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
        chosen, places = linear_sum_assignment(self._scaled()[rows[:, None], columns])
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


def improved(cost: Integers, flow: Integers) -> tuple[Integers, Integers, Integers]:
    """`flow` made one of least cost, and the shortest distances of supplies and demands in its residual graph.

    A flow costs least when its residual graph has no negative cycle (Klein 1967), which Bellman and Ford's method
    finds out in integers, whatever `flow` was computed with. Each cycle found is cancelled.

    Args:
        cost: [supplies, demands].
        flow: [supplies, demands], with the right sums.
    """
    from chameleon_ft.transfer._assignment_kernel import least_cost

    flow = flow.copy()
    return flow, *least_cost(cost, flow)
