"""Segments: neighbouring layers with the same holders, whose gradients are reduced in one message.

Parameters that layers share are segments of their own, for their gradients are summed over the holders of all of these
layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan.placement import LayerRange, Placement
from chameleon_ft.workload import Workload

__all__ = ["Segment", "gradient_segments", "segment_bytes", "tied_segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """What is reduced together.

    Attributes:
        layers: neighbouring layers, without what they share with others; of tied parameters the first of the layers.
        holders: the workers, ascending, that hold all of them; of tied parameters those that hold any.
        tied: all layers that share the parameters, where they are tied.
    """

    layers: LayerRange
    holders: tuple[int, ...]
    tied: tuple[int, ...] = ()

    @property
    def made_by(self) -> tuple[int, ...]:
        """The layers whose backward adds to its gradients."""
        return self.tied or tuple(self.layers)


def gradient_segments(placement: Placement) -> tuple[Segment, ...]:
    """The fewest segments that cover all layers, by first layer: the one order in which every worker issues its own.

    Segments with a single holder are included; they need no message. What layers share comes on top: `tied_segments`.
    Raises NoHolderError when a layer has no holder.
    """
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    holders = [placement.holders(layer) for layer in range(placement.num_layers)]
    starts = [layer for layer in range(len(holders)) if not layer or holders[layer] != holders[layer - 1]]
    return tuple(Segment(LayerRange(start, stop), holders[start]) for start, stop in pairwise([*starts, len(holders)]))


def tied_segments(placement: Placement, tied: Iterable[tuple[int, ...]]) -> tuple[Segment, ...]:
    """A segment for each set of layers that share parameters.

    With a single holder it needs no message, but may still have gradients of several layers to sum.
    """
    return tuple(
        Segment(
            LayerRange(layers[0], layers[0] + 1),
            tuple(sorted({worker for layer in layers for worker in placement.holders(layer)})),
            layers,
        )
        for layers in tied
    )


def segment_bytes(segment: Segment, workload: Workload) -> int:
    """Bytes of the gradients of a segment."""
    if segment.tied:
        return sum(each.gradient_bytes for each in workload.tied if each.layers == segment.tied)
    return sum(layer.gradient_bytes for layer in workload.layers[segment.layers.start : segment.layers.stop]) - sum(
        each.gradient_bytes for each in workload.tied for layer in each.layers if layer in segment.layers
    )
