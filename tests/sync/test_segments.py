"""Gradient segments."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.sync import Segment, gradient_segments
from tests.strategies import placements


@given(placements(several_ranges=True))
def test_segments_are_the_longest_runs_of_equal_holders(placement: Placement) -> None:
    segments = gradient_segments(placement)

    assert [layer for segment in segments for layer in segment.layers] == list(range(placement.num_layers))
    for segment in segments:
        assert all(placement.holders(layer) == segment.holders for layer in segment.layers)
    for one, after in pairwise(segments):
        assert one.holders != after.holders


def test_unequal_pipelines_meet_in_segments() -> None:
    placement = Placement(
        4, {0: (LayerRange(0, 2),), 1: (LayerRange(2, 4),), 2: (LayerRange(0, 1),), 3: (LayerRange(1, 4),)}
    )

    assert gradient_segments(placement) == (
        Segment(LayerRange(0, 1), (0, 2)),
        Segment(LayerRange(1, 2), (0, 3)),
        Segment(LayerRange(2, 4), (1, 3)),
    )


def test_a_layer_without_a_holder_cannot_be_reduced() -> None:
    with pytest.raises(NoHolderError) as caught:
        gradient_segments(Placement(4, {0: (LayerRange(1, 3),)}))

    assert caught.value.layers == (0, 3)
