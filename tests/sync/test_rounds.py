"""Rounds of gradient sync."""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.sync import Segment, gradient_rounds, gradient_segments, tied_segments
from tests.strategies import placements


@given(placements(several_ranges=True))
def test_every_segment_with_company_is_reduced_once_and_no_worker_twice_in_a_round(placement: Placement) -> None:
    found = gradient_rounds(placement)

    reduced = [segment for segment in gradient_segments(placement) if len(segment.holders) > 1]
    assert sorted(found.order, key=lambda segment: segment.layers) == reduced
    for segments in found.rounds:
        assert segments
        assert list(segments) == sorted(segments, key=lambda segment: segment.layers)
        for one, other in combinations(segments, 2):
            assert not set(one.holders) & set(other.holders)


@given(placements(several_ranges=False))
def test_with_one_range_a_worker_the_rounds_are_the_fewest(placement: Placement) -> None:
    found = gradient_rounds(placement)

    most = max(Counter(chain.from_iterable(segment.holders for segment in found.order)).values(), default=0)
    assert len(found.rounds) == most, "no worker can reduce two segments in a round"


@given(placements(several_ranges=True))
def test_rounds_begin_with_the_highest_layers(placement: Placement) -> None:
    tops = [segments[-1].layers.stop for segments in gradient_rounds(placement).rounds]

    assert tops == sorted(tops, reverse=True)


@given(placements(several_ranges=True), st.data())
def test_tied_parameters_are_reduced_by_all_that_hold_a_copy(placement: Placement, data: st.DataObject) -> None:
    most = placement.num_layers - 1
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, most), min_size=min(2, most + 1), max_size=3))))
    tied = [layers] if len(layers) > 1 else []

    found = gradient_rounds(placement, tied)

    plain = [segment for segment in gradient_segments(placement) if len(segment.holders) > 1]
    shared = [segment for segment in tied_segments(placement, tied) if len(segment.holders) > 1]
    assert sorted(found.order, key=lambda segment: (segment.tied, segment.layers)) == [*plain, *shared]
    for segment in shared:
        assert set(segment.holders) == {worker for layer in layers for worker in placement.holders(layer)}
    for segments in found.rounds:
        assert list(segments) == sorted(segments, key=lambda segment: segment.layers)
        for one, other in combinations(segments, 2):
            assert not set(one.holders) & set(other.holders)


def test_equal_pipelines_need_one_round() -> None:
    stages = (LayerRange(0, 2), LayerRange(2, 4))
    found = gradient_rounds(Placement(4, {worker: (stages[worker % 2],) for worker in range(6)}))

    assert found.rounds == ((Segment(stages[0], (0, 2, 4)), Segment(stages[1], (1, 3, 5))),)


def test_three_workers_that_share_in_pairs_need_a_round_more_than_any_takes_part_in() -> None:
    # Each worker holds two of three ranges, as tied embeddings do it: every two segments share a worker.
    placement = Placement(
        3,
        {
            0: (LayerRange(0, 2),),
            1: (LayerRange(1, 3),),
            2: (LayerRange(0, 1), LayerRange(2, 3)),
        },
    )

    found = gradient_rounds(placement)

    assert len(found.rounds) == 3


def test_a_layer_that_no_worker_holds_twice_needs_no_round() -> None:
    assert gradient_rounds(Placement(2, {0: (LayerRange(0, 2),)})).rounds == ()


def test_a_layer_without_a_holder_is_named() -> None:
    with pytest.raises(NoHolderError):
        gradient_rounds(Placement(2, {0: (LayerRange(0, 1),)}))
