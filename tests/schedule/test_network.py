"""The lower bound that ends the search for a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.schedule import list_schedule, replay
from chameleon_ft.schedule.network import builder_of
from chameleon_ft.schedule.records import distinct_paths
from tests.strategies import Planned, Shape, equal_costs, pipelined, pipelines, planned


@given(st.one_of(planned(), pipelined()), st.booleans())
def test_no_schedule_beats_the_bound(case: Planned, forward_first: bool) -> None:
    network = builder_of(case.plan, case.costs).network(*distinct_paths(route.hops for route in case.plan.routes))

    step_s = replay(list_schedule(case.plan, case.costs, forward_first=forward_first), case.costs).step_s

    assert step_s >= network.lower_bound_s() * (1 - 1e-9)


@pytest.mark.parametrize("split_backward", [False, True])
def test_plain_pipelines_meet_the_bound(split_backward: bool) -> None:
    plan = pipelines(Shape(dp=2, pp=4, share=8), split_backward=split_backward)
    costs = equal_costs(layers=4, micro_batches=16, workers=8)
    network = builder_of(plan, costs).network(*distinct_paths(route.hops for route in plan.routes))

    assert network.lower_bound_s() == replay(list_schedule(plan, costs), costs).step_s
