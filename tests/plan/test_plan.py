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
from tests.golden import refused
from tests.strategies import Shape, pipelines, plans, recomputing, some_fused, some_recompute

PLACEMENT = Placement(3, {0: (LayerRange(0, 2),), 1: (LayerRange(2, 3),), 2: (LayerRange(0, 3),)})


def route(micro_batch: int, *hops: tuple[int, int, int]) -> Route:
    return Route(micro_batch, tuple(Hop(worker, LayerRange(start, stop)) for worker, start, stop in hops))


@pytest.mark.parametrize("hops", [(), ((0, 1, 3),), ((0, 0, 1), (1, 2, 3)), ((0, 0, 2), (1, 1, 3))])
def test_a_route_covers_its_layers_once_and_in_order(hops: tuple[tuple[int, int, int], ...]) -> None:
    with refused(PlanError):
        route(4, *hops)


@pytest.mark.parametrize(
    "routes",
    [
        (),
        (route(1, (2, 0, 3)),),
        (route(0, (2, 0, 3)), route(0, (2, 0, 3))),
        (route(0, (0, 0, 2)),),
        (route(0, (2, 0, 3), (2, 3, 4)),),
        (route(0, (0, 0, 3)),),
        (route(0, (9, 0, 3)),),
    ],
)
def test_a_plan_says_what_is_wrong(routes: tuple[Route, ...]) -> None:
    with refused(PlanError):
        Plan(PLACEMENT, routes)


def test_a_plan_may_leave_pipelines_and_workers() -> None:
    plan = Plan(PLACEMENT, (route(0, (0, 0, 2), (1, 2, 3)), route(1, (0, 0, 1), (2, 1, 2), (1, 2, 3))))

    assert plan.micro_batches == 2
    assert plan.workers == (0, 1, 2)


@pytest.mark.parametrize(("worker", "again"), [(7, (0, 1)), (1, (0, 1)), (0, (0, 3)), (0, (1, 9))])
def test_a_worker_can_recompute_only_layers_that_it_holds(worker: int, again: tuple[int, int]) -> None:
    placement = Placement(3, {0: (LayerRange(0, 2),), 1: (LayerRange(2, 3),)})
    with refused(PlanError):
        Plan(placement, (route(0, (0, 0, 2), (1, 2, 3)),), recompute={worker: RecomputedLayers(*again)})


def test_a_range_that_is_recomputed_may_span_several_that_are_held() -> None:
    placement = Placement(6, {0: (LayerRange(0, 2), LayerRange(4, 6)), 1: (LayerRange(2, 4),)})
    plan = Plan(placement, (route(0, (0, 0, 2), (1, 2, 4), (0, 4, 6)),), recompute={0: RecomputedLayers(1, 5)})

    assert dict(plan.recompute) == {0: RecomputedLayers(1, 5)}
    with refused(PlanError):
        dataclasses.replace(plan, recompute={0: RecomputedLayers(2, 4)})


def test_the_workers_of_a_route_all_split_their_backward_or_none_does() -> None:
    plan = pipelines(Shape(dp=2, pp=2, share=1), split_backward=True)
    fused = plan.routes[1].hops[0].worker
    one = frozenset(hop.worker for hop in plan.routes[1].hops)

    assert [dataclasses.replace(plan, fused_workers=one).splits(own) for own in plan.workers].count(False) == 2
    with refused(PlanError):
        dataclasses.replace(plan, fused_workers=frozenset({fused}))
    with refused(PlanError):
        dataclasses.replace(plan, split_backward=False, fused_workers=one)


def test_a_file_says_what_is_recomputed_only_if_something_is() -> None:
    plan = pipelines(Shape(dp=1, pp=3, share=1))
    some = recomputing(plan, (2, 0))

    assert "recompute" not in json.loads(plan.to_json())
    assert json.loads(some.to_json()) == json.loads(plan.to_json()) | {"recompute": {"0": [0, 1], "2": [2, 3]}}


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
    "text",
    [
        "",
        "[" * 100_000,
        "[]",
        "{}",
        changed(format="chameleon-plan/2"),
        changed(extra=1),
        changed(split_backward=1),
        changed(num_layers="2"),
        changed(num_layers=True),
        changed(num_layers=3),
        changed(num_layers=10**9),
        changed(placement=[]),
        changed(placement={"a": []}),
        changed(placement={"9" * 5000: []}),
        changed(placement={"0": 1}),
        changed(placement={"0": [[0]]}),
        changed(placement={"1": [[0, 1]], "01": [[1, 2]]}),
        changed(recompute=1),
        changed(recompute={"0": 1}),
        changed(recompute={"0": [0]}),
        changed(recompute={"0": [1, 2]}),
        changed(recompute={"x": [0, 1]}),
        changed(recompute={"5": [0, 1]}),
        changed(fused_workers=[True]),
        changed(routes={}),
        changed(routes=[]),
        changed(routes=[[[0, 0]]]),
        changed(routes=[[[0, 0, 1.5]]]),
    ],
)
def test_json_that_is_no_plan_is_refused(text: str) -> None:
    with refused(PlanError):
        Plan.from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(plans(), st.data())
def test_broken_json_raises_only_plan_errors(plan: Plan, data: st.DataObject) -> None:
    document = {"recompute": {}, **json.loads(plan.to_json())}
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
    with refused(PlanError):
        RecomputedLayers(1, 5, 5)
