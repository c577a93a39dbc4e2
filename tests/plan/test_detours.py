"""Which hops are detours."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.plan.layouts import detoured_hops, disjoint_pipelines, home_pipelines
from chameleon_ft.recovery import reroute
from tests.golden import refused
from tests.strategies import Shape, equal_costs, losses, pipelines, survivable


def plan_of(ways: list[list[int]]) -> Plan:
    """A plan with a layer to every hop and one micro-batch to every way, given by its workers."""
    held: dict[int, set[int]] = {}
    for way in ways:
        for layer, worker in enumerate(way):
            held.setdefault(worker, set()).add(layer)
    ranges = {w: tuple(LayerRange(n, n + 1) for n in layers) for w, layers in held.items()}
    routes = tuple(
        Route(number, tuple(Hop(worker, LayerRange(n, n + 1)) for n, worker in enumerate(way)))
        for number, way in enumerate(ways)
    )
    return Plan(Placement(len(ways[0]), ranges), routes)


def pipelines_of(shape: Shape) -> list[list[int]]:
    return [list(range(d * shape.pp, (d + 1) * shape.pp)) for d in range(shape.dp)]


def with_detours(plan: Plan, lost: list[int]) -> Plan:
    """Each hop of a lost worker on one of the live holders of its layers, and all others where they were."""
    left = plan.placement.without(lost)

    def moved(micro_batch: int, hop: Hop) -> Hop:
        holders = left.holders(hop.layers.start)
        return hop if hop.worker in holders else Hop(holders[micro_batch % len(holders)], hop.layers)

    routes = (Route(r.micro_batch, tuple(moved(r.micro_batch, hop) for hop in r.hops)) for r in plan.routes)
    return Plan(left, tuple(routes))


@given(st.builds(Shape, dp=st.integers(2, 4), pp=st.integers(2, 5), share=st.integers(1, 4)), st.data())
def test_the_detours_are_the_hops_that_have_moved(shape: Shape, data: st.DataObject) -> None:
    before = pipelines(shape)
    lost = data.draw(losses(before, most=3))
    assume(survivable(before, lost))
    # Where half of a pipeline or more is gone, the way home is not to be seen any more.
    assume(all(sum(worker in lost for worker in workers) * 2 < shape.pp for workers in pipelines_of(shape)))
    after = with_detours(before, lost)

    moved = {
        (route.micro_batch, index)
        for route, old in zip(after.routes, before.routes, strict=True)
        for index, (hop, old_hop) in enumerate(zip(route.hops, old.hops, strict=True))
        if hop != old_hop
    }
    assert moved
    assert detoured_hops(after, pipelines_of(shape)) == moved


@given(st.builds(Shape, dp=st.integers(1, 4), pp=st.integers(1, 5), share=st.integers(1, 4)))
def test_there_are_none_while_no_worker_is_lost(shape: Shape) -> None:
    assert not detoured_hops(pipelines(shape), pipelines_of(shape))


@pytest.mark.parametrize(
    ("ways", "detour"),
    [
        pytest.param([[2, 1], [2, 3]], (0, 0), id="worker 0 is lost"),
        pytest.param([[0, 3], [2, 3]], (0, 1), id="worker 1 is lost"),
        pytest.param([[0, 3], [0, 1]], (0, 0), id="worker 2 is lost, of the pipeline that the route comes to last"),
    ],
)
def test_between_equals_the_pipeline_with_a_lost_worker_is_home(ways: list[list[int]], detour: tuple[int, int]) -> None:
    assert detoured_hops(plan_of(ways), [[0, 1], [2, 3]]) == {detour}


def test_between_whole_pipelines_the_one_that_comes_first_on_the_route_is_home() -> None:
    both_whole = plan_of([[0, 3], [2, 1]])
    assert detoured_hops(both_whole, [[0, 1], [2, 3]]) == {(0, 1), (1, 1)}


def test_most_hops_count_for_more_than_a_lost_worker() -> None:
    # Worker 2 is lost.
    assert detoured_hops(plan_of([[3, 1, 5], [3, 4, 5], [0, 1, 5]]), [[0, 1, 2], [3, 4, 5]]) == {(0, 1), (2, 2)}


def test_workers_that_are_in_no_pipeline_make_no_detours() -> None:
    assert not detoured_hops(plan_of([[9, 1, 8]]), [[0, 1, 2]])
    assert detoured_hops(plan_of([[9, 1, 2, 5]]), [[0, 1, 2], [3, 4, 5]]) == {(0, 3)}


def test_a_worker_of_two_pipelines_is_refused() -> None:
    with refused(PlanError):
        detoured_hops(plan_of([[0, 1]]), [[0, 1], [2, 3], [1, 4]])


def test_pipelines_are_distinguished_from_detours() -> None:
    before = pipelines(Shape(dp=3, pp=2, share=4))
    assert disjoint_pipelines(before) == [(0, 1), (2, 3), (4, 5)]
    rerouted = reroute(before, [3], equal_costs(layers=before.placement.num_layers, micro_batches=12, workers=6))
    found = disjoint_pipelines(rerouted)
    assert {(0, 1), (4, 5)} <= set(found) or len(found) == 2
    assert len({worker for pipeline in found for worker in pipeline}) == sum(map(len, found))


def test_detours_start_from_the_pipelines_of_the_last_move() -> None:
    before = pipelines(Shape(dp=3, pp=2, share=4))
    rerouted = reroute(before, [3], equal_costs(layers=before.placement.num_layers, micro_batches=12, workers=6))
    moved = plan_of([[0, 1], [4, 2], [5, 5]])
    assert home_pipelines([before, rerouted]) == [(0, 1), (2, 3), (4, 5)]
    assert home_pipelines([before, rerouted, before]) == [(0, 1), (2, 3), (4, 5)], (
        "a worker that is back holds its former layers"
    )
    assert home_pipelines([before, rerouted, moved]) == disjoint_pipelines(moved)
    assert detoured_hops(moved, home_pipelines([before, rerouted, moved])) == frozenset()
    assert detoured_hops(moved, home_pipelines([before])) != frozenset()
