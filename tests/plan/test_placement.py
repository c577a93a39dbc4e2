"""Which layers each worker holds."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from tests.golden import refused
from tests.strategies import placements


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 3)])
def test_a_range_is_never_empty(start: int, stop: int) -> None:
    with refused(PlanError):
        LayerRange(start, stop)


def test_a_range_is_its_layers() -> None:
    layers = LayerRange(2, 5)

    assert list(layers) == [2, 3, 4]
    assert len(layers) == 3
    assert 4 in layers
    assert 5 not in layers
    assert "4" not in layers
    assert str(layers) == "[2, 5)"
    assert layers.covers(LayerRange(3, 5))
    assert not layers.covers(LayerRange(1, 3))


@pytest.mark.parametrize(
    ("num_layers", "ranges"),
    [
        (0, {}),
        (2, {-1: (LayerRange(0, 2),)}),
        (2, {3: ()}),
        (2, {3: (LayerRange(0, 3),)}),
        (4, {3: (LayerRange(1, 3), LayerRange(0, 2))}),
    ],
)
def test_a_placement_says_what_is_wrong(num_layers: int, ranges: dict[int, tuple[LayerRange, ...]]) -> None:
    with refused(PlanError):
        Placement(num_layers, ranges)


def test_placements_that_say_the_same_are_equal() -> None:
    apart = Placement(4, {1: (LayerRange(2, 3), LayerRange(0, 2)), 0: (LayerRange(3, 4),)})
    joined = Placement(4, {0: (LayerRange(3, 4),), 1: (LayerRange(0, 3),)})

    assert apart == joined
    assert hash(apart) == hash(joined)
    assert apart.workers == (0, 1)
    assert apart.holds(1, LayerRange(1, 3))


@given(placements(several_ranges=True))
def test_the_layer_with_the_fewest_holders_counts(placement: Placement) -> None:
    holders = [len(placement.holders(layer)) for layer in range(placement.num_layers)]
    assert placement.fewest_holders == min(holders)


def test_a_layer_without_a_holder_is_named() -> None:
    placement = Placement(4, {7: (LayerRange(1, 3),)})

    assert placement.unheld_layers == (0, 3)
    assert placement.holders(0) == ()
    assert placement.ranges_of(8) == ()
    assert not placement.holds(8, LayerRange(1, 2))
    with refused(PlanError):
        placement.holders(4)


@given(placements(several_ranges=True), st.data())
def test_an_indispensable_worker_leaves_a_layer_without_holder(placement: Placement, data: st.DataObject) -> None:
    groups = {worker: data.draw(st.sampled_from("abc")) for worker in placement.workers}
    for group in "abc":
        left = placement.without([worker for worker in placement.workers if groups[worker] == group])
        takes_a_layer = set(left.unheld_layers) > set(placement.unheld_layers)
        assert (group in placement.single_points_of_failure(groups)) == takes_a_layer


@given(placements(several_ranges=True), st.data())
def test_without_takes_workers_out_of_every_layer(placement: Placement, data: st.DataObject) -> None:
    gone = set(data.draw(st.lists(st.sampled_from(placement.workers))))

    left = placement.without([*gone, 99])

    assert set(left.workers) == set(placement.workers) - gone
    for layer in range(placement.num_layers):
        assert left.holders(layer) == tuple(w for w in placement.holders(layer) if w not in gone)
        for worker in left.workers:
            held = LayerRange(layer, layer + 1)
            assert left.holds(worker, held) == placement.holds(worker, held) == (worker in left.holders(layer))


@given(placements(several_ranges=True))
def test_a_placement_survives_copies_and_pickles(placement: Placement) -> None:
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert hash(copy.deepcopy(placement)) == hash(placement)


def test_a_frozen_map_is_frozen() -> None:
    source = {1: "one"}
    frozen = FrozenMap(source)
    source[2] = "two"

    assert frozen == {1: "one"}
    assert repr(frozen) == "FrozenMap({1: 'one'})"
    with pytest.raises(AttributeError, match="cannot change"):
        frozen.more = 1
    with pytest.raises(TypeError):
        frozen[2] = "two"  # type: ignore[index]
