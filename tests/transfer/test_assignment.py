"""Flows of least cost between groups, against trying every assignment of single units."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.schedule.records import Integers
from chameleon_ft.transfer import _assignment
from chameleon_ft.transfer._assignment import Balanced, improved


@st.composite
def problems(draw: st.DrawFn, *, largest: int) -> Balanced:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    units = draw(st.integers(max(rows, columns), 5))
    cost = draw(
        st.lists(st.lists(st.integers(0, largest), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
    return Balanced(np.array(cost), shares(draw, units, rows), shares(draw, units, columns))


def shares(draw: st.DrawFn, units: int, parts: int) -> Integers:
    """`units` in so many parts, none of which is empty."""
    cuts = sorted(draw(st.permutations(range(1, units)))[: parts - 1])
    return np.diff([0, *cuts, units]).astype(np.int64)


def every_outcome(problem: Balanced, preferred: list[list[bool]]) -> set[tuple[int, int, int]]:
    """(total cost, largest cost of a unit, units that are not preferred) of every assignment."""
    rows = np.repeat(np.arange(len(problem.supply)), problem.supply).tolist()
    columns = np.repeat(np.arange(len(problem.demand)), problem.demand).tolist()
    cost = problem.cost.tolist()
    return {
        (
            sum(cost[i][j] for i, j in zip(rows, order, strict=True)),
            max(cost[i][j] for i, j in zip(rows, order, strict=True)),
            sum(not preferred[i][j] for i, j in zip(rows, order, strict=True)),
        )
        for order in set(permutations(columns))
    }


def check_sums(problem: Balanced, flow: Integers) -> None:
    assert (flow >= 0).all()
    assert flow.sum(axis=1).tolist() == problem.supply.tolist()
    assert flow.sum(axis=0).tolist() == problem.demand.tolist()


# With one unit matched by one, and with groups, whatever their size.
@pytest.mark.parametrize("few", [0, 100])
def test_the_flow_is_the_best_by_all_three_criteria(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_assignment, "_FEW", few)

    @given(problems(largest=4), st.data())
    def check(problem: Balanced, data: st.DataObject) -> None:
        rows, columns = problem.cost.shape
        row = st.lists(st.booleans(), min_size=columns, max_size=columns)
        preferred = data.draw(st.lists(row, min_size=rows, max_size=rows))

        flow = problem.fair_flow(preferred)

        check_sums(problem, flow)
        total = int((problem.cost * flow).sum())
        others = int(flow[~np.array(preferred)].sum())
        assert (total, int(problem.cost[flow > 0].max()), others) == min(every_outcome(problem, preferred))
        assert int((problem.cost * problem.min_cost_flow()).sum()) == total

    check()


@given(problems(largest=2**50), st.data())
def test_any_flow_is_improved_to_one_of_least_cost_and_proven_by_its_distances(
    problem: Balanced, data: st.DataObject
) -> None:
    rows = np.repeat(np.arange(len(problem.supply)), problem.supply)
    columns = data.draw(st.permutations(np.repeat(np.arange(len(problem.demand)), problem.demand).tolist()))
    start = np.zeros(problem.cost.shape, dtype=np.int64)
    np.add.at(start, (rows, np.array(columns)), 1)

    flow, from_supply, to_demand = improved(problem.cost, start)

    check_sums(problem, flow)
    nothing = [[False] * problem.cost.shape[1]] * problem.cost.shape[0]
    assert int((problem.cost * flow).sum()) == min(every_outcome(problem, nothing))[0]
    slack = problem.cost - (to_demand[None, :] - from_supply[:, None])
    assert (slack >= 0).all()
    assert (slack[flow > 0] == 0).all()
