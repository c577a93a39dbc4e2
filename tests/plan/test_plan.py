"""Routes and plans: what makes them valid, and their JSON."""

from __future__ import annotations

import dataclasses
import json
import pickle
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from tests.strategies import Shape, pipelines, plans, recomputing, some_fused, some_recompute

PLACEMENT = Placement(3, {0: (LayerRange(0, 2),), 1: (LayerRange(2, 3),), 2: (LayerRange(0, 3),)})


def route(micro_batch: int, *hops: tuple[int, int, int]) -> Route:
    return Route(micro_batch, tuple(Hop(worker, LayerRange(start, stop)) for worker, start, stop in hops))


@pytest.mark.parametrize(
    ("hops", "match"),
    [
        ((), "has no hops"),
        (((0, 1, 3),), r"micro-batch 4 must continue at layer 0, but worker 0 runs layers \[1, 3\)"),
        (((0, 0, 1), (1, 2, 3)), "must continue at layer 1"),
        (((0, 0, 2), (1, 1, 3)), "must continue at layer 2"),
    ],
)
def test_a_route_covers_its_layers_once_and_in_order(hops: tuple[tuple[int, int, int], ...], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        route(4, *hops)


@pytest.mark.parametrize(
    ("routes", "match"),
    [
        ((), "a route for every micro-batch"),
        ((route(1, (2, 0, 3)),), "at index 0 is micro-batch 1"),
        ((route(0, (2, 0, 3)), route(0, (2, 0, 3))), "at index 1 is micro-batch 0"),
        ((route(0, (0, 0, 2)),), "ends before layer 2, but the placement has 3 layers"),
        ((route(0, (2, 0, 3), (2, 3, 4)),), "ends before layer 4"),
        ((route(0, (0, 0, 3)),), r"layers \[0, 3\) on worker 0, which holds \[0, 2\)"),
        ((route(0, (9, 0, 3)),), "on worker 9, which holds none"),
    ],
)
def test_a_plan_says_what_is_wrong(routes: tuple[Route, ...], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Plan(PLACEMENT, routes)


def test_a_plan_may_leave_pipelines_and_workers() -> None:
    plan = Plan(PLACEMENT, (route(0, (0, 0, 2), (1, 2, 3)), route(1, (0, 0, 1), (2, 1, 2), (1, 2, 3))))

    assert plan.micro_batches == 2
    assert plan.workers == (0, 1, 2)


@pytest.mark.parametrize(
    ("worker", "again", "held"),
    [(7, (0, 1), "none"), (1, (0, 1), r"\[2, 3\)"), (0, (0, 3), r"\[0, 2\)"), (0, (1, 9), r"\[0, 2\)")],
)
def test_a_worker_can_recompute_only_layers_that_it_holds(worker: int, again: tuple[int, int], held: str) -> None:
    placement = Placement(3, {0: (LayerRange(0, 2),), 1: (LayerRange(2, 3),)})
    match = rf"worker {worker} is to recompute layers \[{again[0]}, {again[1]}\), but it holds {held};"
    with pytest.raises(PlanError, match=match):
        Plan(placement, (route(0, (0, 0, 2), (1, 2, 3)),), recompute={worker: RecomputedLayers(*again)})


def test_a_range_that_is_recomputed_may_span_several_that_are_held() -> None:
    placement = Placement(6, {0: (LayerRange(0, 2), LayerRange(4, 6)), 1: (LayerRange(2, 4),)})
    plan = Plan(placement, (route(0, (0, 0, 2), (1, 2, 4), (0, 4, 6)),), recompute={0: RecomputedLayers(1, 5)})

    assert dict(plan.recompute) == {0: RecomputedLayers(1, 5)}
    with pytest.raises(PlanError, match="must begin and end with a layer that it holds"):
        dataclasses.replace(plan, recompute={0: RecomputedLayers(2, 4)})


def test_the_workers_of_a_route_all_split_their_backward_or_none_does() -> None:
    plan = pipelines(Shape(dp=2, pp=2, share=1), split_backward=True)
    fused = plan.routes[1].hops[0].worker
    one = frozenset(hop.worker for hop in plan.routes[1].hops)

    assert [dataclasses.replace(plan, fused_workers=one).splits(own) for own in plan.workers].count(False) == 2
    with pytest.raises(PlanError, match="on the route of micro-batch 1 some workers split their backward"):
        dataclasses.replace(plan, fused_workers=frozenset({fused}))
    with pytest.raises(PlanError, match="only in a plan with split backward"):
        dataclasses.replace(plan, split_backward=False, fused_workers=one)


def test_a_file_says_what_is_recomputed_only_if_something_is() -> None:
    plan = pipelines(Shape(dp=1, pp=3, share=1))
    some = recomputing(plan, (2, 0))

    assert "recompute" not in json.loads(plan.to_json())
    assert json.loads(some.to_json()) == json.loads(plan.to_json()) | {"recompute": {"0": [0, 1], "2": [2, 3]}}


@given(plans(), st.data())
def test_a_list_of_workers_in_an_older_file_means_all_their_layers(plan: Plan, data: st.DataObject) -> None:
    workers = data.draw(st.sets(st.sampled_from(plan.workers)))
    older = json.dumps(json.loads(plan.to_json()) | {"recompute": sorted(workers)})

    assert Plan.from_json(older) == recomputing(plan, workers)


@given(plans().flatmap(some_recompute).flatmap(some_fused))
def test_json_gives_back_the_plan(plan: Plan) -> None:
    text = plan.to_json()

    assert "\n" not in text
    assert Plan.from_json(text) == plan
    assert hash(Plan.from_json(text)) == hash(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(pipelines(Shape(dp=1, pp=2, share=1)).to_json()) | fields)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "must have \"format\" 'chameleon-plan/1'; got None"),
        (changed(format="chameleon-plan/2"), "chameleon-plan/2"),
        (changed(extra=1), r"must have the fields .* got .*'extra'"),
        (changed(split_backward=1), "must be true or false"),
        (changed(num_layers="2"), "num_layers of a plan must be an integer"),
        (changed(num_layers=True), "num_layers of a plan must be an integer"),
        (changed(num_layers=3), "ends before layer 2"),
        (changed(placement=[]), "the placement of a plan must be a JSON object"),
        (changed(placement={"a": []}), "got the worker 'a'"),
        (changed(placement={"9" * 5000: []}), "got the worker '999"),
        (changed(recompute=1), "recompute of a plan must be a JSON object"),
        (changed(recompute={"0": 1}), "recompute of worker 0 must be a list"),
        (changed(recompute={"x": [0, 1]}), "recompute of a plan must map worker ids to ranges; got the worker 'x'"),
        (changed(recompute={"0": [1, 2]}), r"worker 0 is to recompute layers \[1, 2\), but it holds \[0, 1\)"),
        (changed(recompute=[True]), "a worker in recompute of a plan must be an integer; got True"),
        (changed(recompute=[5]), "worker 5 holds no layers"),
        (changed(num_layers=10**9), "num_layers of a plan must be at most 1000000"),
        (changed(placement={"0": 1}), "the ranges of worker 0 must be a list"),
        (changed(placement={"0": [[0]]}), "lists of 2 integers"),
        (changed(placement={"1": [[0, 1]], "01": [[1, 2]]}), "got the worker '01'"),
        (changed(routes={}), "the routes of a plan must be a list"),
        (changed(routes=[[[0, 0]]]), "the route of micro-batch 0 must hold lists of 3 integers"),
        (changed(routes=[[[0, 0, 1.5]]]), "the route of micro-batch 0 must be an integer"),
        (changed(routes=[]), "a route for every micro-batch"),
    ],
)
def test_json_that_is_no_plan_is_refused(text: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Plan.from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(plans(), st.data())
def test_broken_json_raises_only_plan_errors(plan: Plan, data: st.DataObject) -> None:
    document = {"recompute": [], **json.loads(plan.to_json())}
    field = data.draw(st.sampled_from(sorted(document)))
    document[field] = data.draw(json_values)

    with suppress(PlanError):
        Plan.from_json(json.dumps(document))


def test_a_file_says_how_many_layers_are_recomputed_selectively_only_if_some_are() -> None:
    placement = Placement(6, {0: (LayerRange(0, 6),)})
    plan = Plan(placement, (route(0, (0, 0, 6)),), recompute={0: RecomputedLayers(1, 5, 3)})

    assert '"recompute":{"0":[1,5,3]}' in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan
    in_full = dataclasses.replace(plan, recompute={0: RecomputedLayers(1, 5)})
    assert '"recompute":{"0":[1,5]}' in in_full.to_json()
    assert Plan.from_json(in_full.to_json()) == in_full


def test_no_more_layers_are_recomputed_selectively_than_are_recomputed() -> None:
    layers = RecomputedLayers(1, 5, 3)

    assert (list(layers.full), list(layers.selective)) == ([1], [2, 3, 4])
    with pytest.raises(PlanError, match="of 4 layers that are recomputed, 5 cannot be recomputed selectively"):
        RecomputedLayers(1, 5, 5)
