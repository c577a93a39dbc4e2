"""Programs found beyond the list schedules: never longer, within the limits, and executable."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import InFlightLimit, best_program, check_program, default_limits, list_schedule, replay
from chameleon_ft.schedule.best import ListSchedules, Problem, ScheduledPart, program_of, reordered, reprioritized
from chameleon_ft.schedule.list_scheduler import Rules, Schedule, schedule
from chameleon_ft.schedule.network import builder_of
from chameleon_ft.schedule.records import Component, distinct_paths
from tests.examples import examples
from tests.schedule.in_flight import exceeds
from tests.strategies import Planned, Shape, equal_costs, losses, pipelined, pipelines, planned, survivable

# Enough for every search to begin.
EFFORT = 15_000


def problem_of(case: Planned) -> Problem:
    ways = distinct_paths(route.hops for route in case.plan.routes)
    return Problem.of(builder_of(case.plan, case.costs), *ways, None)


def listed(case: Planned) -> Schedule:
    """The best list schedule, before any search."""
    return ListSchedules(problem_of(case)).search()


@st.composite
def rerouted(draw: st.DrawFn) -> Planned:
    case = draw(pipelined())
    lost = draw(losses(case.plan, most=2))
    assume(survivable(case.plan, lost))
    return Planned(reroute(case.plan, lost, case.costs), case.costs)


@settings(max_examples=examples(40))
@given(rerouted(), st.integers(1, 5), st.integers(0, 3))
def test_in_flight_limits_hold_and_the_result_is_no_longer_than_a_list_schedule(
    case: Planned, in_flight: int, more: int
) -> None:
    plan, costs = case.plan, case.costs
    in_flight_limits = dict.fromkeys(plan.workers, InFlightLimit(in_flight, in_flight + more))

    best = best_program(plan, costs, in_flight_limits=in_flight_limits)

    check_program(best.program, plan)
    assert not exceeds(best.program, best.limits)
    for worker in plan.workers:
        assert best.limits[worker].in_flight <= in_flight
        assert best.limits[worker].kept <= in_flight + more
    for forward_first in (True, False):
        listed = list_schedule(plan, costs, _lower(default_limits(plan), in_flight_limits), forward_first=forward_first)
        assert best.step_s <= replay(listed, costs).step_s * (1 + 1e-9)
    assert best_program(plan, costs, in_flight_limits=in_flight_limits) == best


def _lower(limits: Mapping[int, InFlightLimit], in_flight_limits: dict[int, InFlightLimit]) -> dict[int, InFlightLimit]:
    lower: dict[int, InFlightLimit] = {}
    for worker, limit in limits.items():
        kept = min(limit.kept, in_flight_limits[worker].kept)
        lower[worker] = InFlightLimit(min(limit.in_flight, in_flight_limits[worker].in_flight, kept), kept)
    return lower


@settings(max_examples=examples(50))
@given(st.one_of(planned(), rerouted()))
def test_each_search_says_what_its_orders_take(case: Planned) -> None:
    network, found = problem_of(case).network, listed(case)
    assume(not found.beyond_limits)

    plan = case.plan
    every = Component(workers=plan.workers, routes=plan.routes, paths=(), path_of=())
    for better in (
        reprioritized(network, found, enough_s=0.0, effort=EFFORT),
        reordered(network, found, found.limits, enough_s=0.0, effort=EFFORT),
    ):
        program = program_of(plan, [ScheduledPart(every, better)])
        check_program(program, plan)
        assert better.step_s <= found.step_s
        assert better.step_s == replay(program, case.costs).step_s


@settings(max_examples=examples(40))
@given(rerouted())
def test_what_is_enough_is_left_as_it_is(case: Planned) -> None:
    network, found = problem_of(case).network, listed(case)

    assert reprioritized(network, found, enough_s=found.step_s, effort=EFFORT) is found
    again = reordered(network, found, found.limits, enough_s=found.step_s, effort=EFFORT)
    assert again.codes.tolist() == found.codes.tolist()


@pytest.mark.parametrize(
    ("pp", "lost", "split_backward", "listed_s", "searched_s"),
    [(3, 0, False, 26.0, 25.0), (4, 1, False, 28.0, 27.0), (4, 0, True, 25.0, 24.0)],
)
def test_another_order_of_micro_batches_is_found_where_it_is_shorter(
    pp: int, lost: int, split_backward: bool, listed_s: float, searched_s: float
) -> None:
    before = pipelines(Shape(dp=2, pp=pp, share=4), split_backward=split_backward)
    costs = equal_costs(layers=before.placement.num_layers, micro_batches=8, workers=2 * pp)
    plan = reroute(before, [lost], costs)
    problem = problem_of(Planned(plan, costs))
    rules = Rules(limits=problem.largest(), forward_first=True, patience=0.75 if split_backward else 0.0)
    found = schedule(problem.network, rules)

    better = reprioritized(problem.network, found, enough_s=0.0, effort=EFFORT)

    assert (found.step_s, better.step_s) == (listed_s, searched_s)
