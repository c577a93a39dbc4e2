"""Assignments of workers to places, against a complete search."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange, Plan, data_pipeline_plan
from chameleon_ft.transfer import Holding, assign_roles, min_moved_bytes, remap_plan
from tests.golden import refused
from tests.strategies import plans
from tests.transfer.instances import held_by, layers_of, moves

Move = tuple[dict[int, Holding], dict[int, Holding]]


def outcome(roles: dict[int, int], move: Move, sizes: list[int]) -> tuple[int, list[int], int]:
    """Bytes in total, the largest receive of each kind, and the workers that do not keep what they hold."""
    workers, places = move
    receives = {
        place: sum(sizes[number] for number in held_by(places[place]) - held_by(workers[worker]))
        for place, worker in roles.items()
    }
    kinds = sorted({places[place].kind for place in roles}, key=str)
    largest = [max(receives[place] for place in roles if places[place].kind == kind) for kind in kinds]
    changed = sum(places[place].ranges != workers[worker].ranges for place, worker in roles.items())
    return sum(receives.values()), largest, changed


@given(moves(), st.lists(st.sampled_from([0, 1, 2, 2, 5]), min_size=5, max_size=5))
def test_no_other_roles_move_less_or_give_one_worker_less_to_receive(move: Move, sizes: list[int]) -> None:
    workers, places = move

    roles = assign_roles(workers, places, layers_of(sizes))

    assert list(roles) == sorted(places)
    assert len(set(roles.values())) == len(roles)
    assert all(workers[worker].kind == places[place].kind for place, worker in roles.items())
    every = [
        dict(zip(places, chosen, strict=True))
        for chosen in permutations(workers, len(places))
        if all(workers[w].kind == place.kind for w, place in zip(chosen, places.values(), strict=True))
    ]
    assert outcome(roles, move, sizes) == min(outcome(each, move, sizes) for each in every)
    assert min_moved_bytes(workers, places, layers_of(sizes)) == outcome(roles, move, sizes)[0]


@given(moves(), st.data())
def test_a_worker_that_is_asked_for_by_number_and_holds_it_already_keeps_it(move: Move, data: st.DataObject) -> None:
    workers, _ = move
    same = [number for number, each in workers.items() if each.ranges]
    kept = data.draw(st.sets(st.sampled_from(same))) if same else set()

    roles = assign_roles(workers, {number: workers[number] for number in kept}, layers_of([1] * 5))

    assert roles == {number: number for number in sorted(kept)}


def test_a_small_largest_receive_counts_for_more_than_a_worker_that_keeps_what_it_has() -> None:
    workers = {0: Holding((LayerRange(0, 2),)), 1: Holding((LayerRange(1, 3),))}
    places = {0: Holding((LayerRange(1, 3),)), 1: Holding((LayerRange(2, 4),))}

    assert assign_roles(workers, places, layers_of([1] * 4)) == {0: 0, 1: 1}


def test_thousands_of_workers_are_assigned_in_groups() -> None:
    """Of 2,500 pipelines one becomes idle, and the places of the others are numbered from the second stage on."""
    now = data_pipeline_plan(layer_costs=[1.0] * 12, dp=2500, pp=4, micro_batches=2500).placement
    workers = {worker: Holding(ranges) for worker, ranges in now.ranges.items()}
    places = {worker: Holding(now.ranges_of((worker + 1) % 4)) for worker in range(9996)}

    roles = assign_roles(workers, places, layers_of([7] * 12))

    assert all(workers[worker] == places[place] for place, worker in roles.items())
    assert len(set(roles.values())) == 9996


def test_more_places_than_workers_of_their_kind_are_refused() -> None:
    places = {0: Holding((LayerRange(0, 1),), "large"), 1: Holding((LayerRange(0, 1),), "large")}

    with refused(PlanError):
        assign_roles({3: Holding((), "large"), 4: Holding((), "small")}, places, layers_of([1]))


def test_layers_that_have_no_cost_are_refused() -> None:
    with refused(PlanError):
        assign_roles({0: Holding(())}, {0: Holding((LayerRange(0, 2),))}, layers_of([1]))


@given(plans(), st.data())
def test_a_plan_in_roles_is_the_same_plan_of_other_workers(plan: Plan, data: st.DataObject) -> None:
    roles = dict(zip(plan.workers, data.draw(st.permutations(range(10, 10 + len(plan.workers)))), strict=True))

    moved = remap_plan(plan, roles)

    assert {roles[w]: plan.placement.ranges_of(w) for w in plan.workers} == dict(moved.placement.ranges)
    for before, after in zip(plan.routes, moved.routes, strict=True):
        assert [(roles[hop.worker], hop.layers) for hop in before.hops] == [(h.worker, h.layers) for h in after.hops]
    assert remap_plan(moved, {new: old for old, new in roles.items()}) == plan
