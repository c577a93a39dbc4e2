"""The standard layouts."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import (
    Hop,
    LayerRange,
    PipelineLayout,
    RecomputedLayers,
    data_pipeline_plan,
    pipelines_plan,
    split_layers,
)
from tests.golden import refused
from tests.strategies import seconds, shapes


@given(st.lists(seconds | st.just(0.0), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_cheaper_slowest_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    cut = split_layers(costs, stages)

    assert len(cut) == stages
    assert [layer for layers in cut for layer in layers] == list(range(len(costs)))
    least = min(
        max(math.fsum(costs[start:stop]) for start, stop in pairwise((0, *inner, len(costs))))
        for inner in combinations(range(1, len(costs)), stages - 1)
    )
    assert max(math.fsum(costs[layers.start : layers.stop]) for layers in cut) == pytest.approx(least)


def test_an_expensive_layer_is_alone() -> None:
    assert split_layers([1, 1, 5, 1], 3) == (LayerRange(0, 2), LayerRange(2, 3), LayerRange(3, 4))


@pytest.mark.parametrize("stages", [0, 4, -1])
def test_there_are_at_most_as_many_stages_as_layers(stages: int) -> None:
    with refused(PlanError):
        split_layers([1.0, 1.0, 1.0], stages)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_costs_are_amounts(cost: float) -> None:
    with refused(PlanError):
        split_layers([1.0, cost], 1)


@given(shapes, st.data())
def test_pipelines_lie_side_by_side(shape: object, data: st.DataObject) -> None:
    dp, pp, share = (getattr(shape, name) for name in ("dp", "pp", "share"))
    workers = data.draw(st.permutations(range(10, 10 + dp * pp)))
    split = data.draw(st.booleans())

    plan = data_pipeline_plan(
        layer_costs=[1.0] * (2 * pp), dp=dp, pp=pp, micro_batches=dp * share, workers=workers, split_backward=split
    )

    stages = split_layers([1.0] * (2 * pp), pp)
    assert plan.split_backward == split
    assert plan.workers == tuple(sorted(workers))
    for micro_batch, route in enumerate(plan.routes):
        pipeline = micro_batch // share
        assert route.hops == tuple(Hop(workers[pipeline * pp + s], stages[s]) for s in range(pp))


@pytest.mark.parametrize(
    "changes", [{"dp": 0}, {"pp": 3}, {"micro_batches": 5}, {"workers": [0, 1, 2]}, {"workers": [0, 1, 2, 2]}]
)
def test_a_layout_that_does_not_fit_is_refused(changes: dict[str, object]) -> None:
    arguments: dict[str, object] = {"layer_costs": [1.0, 1.0], "dp": 2, "pp": 2, "micro_batches": 4}
    with refused(PlanError):
        data_pipeline_plan(**(arguments | changes))  # type: ignore[arg-type]


def test_pipelines_of_any_depths_make_a_plan() -> None:
    layouts = [PipelineLayout((2, 5), (7, 1), 2), PipelineLayout((5,), (4,), 1)]

    plan = pipelines_plan(layouts, split_backward=True, recompute={4: RecomputedLayers(0, 5)})

    first = (Hop(7, LayerRange(0, 2)), Hop(1, LayerRange(2, 5)))
    assert [route.hops for route in plan.routes] == [first, first, (Hop(4, LayerRange(0, 5)),)]
    assert plan.workers == (1, 4, 7)
    assert plan.split_backward
    assert plan.recompute == {4: RecomputedLayers(0, 5)}
    assert not pipelines_plan(layouts).recompute


@pytest.mark.parametrize(
    ("cut_points", "workers", "micro_batches"),
    [((2, 5), (0,), 1), ((), (), 1), ((0, 5), (0, 1), 1), ((5, 5), (0, 1), 1), ((5,), (0,), 0)],
)
def test_a_pipeline_is_checked(cut_points: tuple[int, ...], workers: tuple[int, ...], micro_batches: int) -> None:
    with refused(PlanError):
        PipelineLayout(cut_points, workers, micro_batches)


def test_a_worker_has_one_stage() -> None:
    with refused(PlanError):
        pipelines_plan([PipelineLayout((1, 2), (0, 1), 1), PipelineLayout((2,), (1,), 1)])
    with refused(PlanError):
        pipelines_plan([])
