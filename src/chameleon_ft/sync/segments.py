"""Segments: neighbouring layers with the same holders, whose gradients are reduced in one message."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan.placement import LayerRange, Placement

__all__ = ["Segment", "gradient_segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring layers and the workers, ascending, that hold all of them."""

    layers: LayerRange
    holders: tuple[int, ...]


def gradient_segments(placement: Placement) -> tuple[Segment, ...]:
    """The fewest segments that cover all layers, by first layer: the one order in which every worker issues its own.

    Segments with a single holder are included; they need no message. Raises NoHolderError when a layer has no holder.
    """
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    segments: list[Segment] = []
    for holders, layers in groupby(range(placement.num_layers), key=placement.holders):
        numbers = list(layers)
        segments.append(Segment(LayerRange(numbers[0], numbers[-1] + 1), holders))
    return tuple(segments)
