"""Segments: neighbouring layers with the same holders, whose gradients are reduced in one message.

Tied parameters are segments of their own, because their gradients are summed over the holders of all tied layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan.placement import LayerRange, Placement
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.workload import Workload

__all__ = ["Segment", "gradient_segments", "issue_points", "segment_bytes", "tied_segments"]

_ADDS_TO_GRADIENTS = (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class Segment:
    """Gradients that are reduced together: of neighbouring layers, or of parameters that layers share.

    Attributes:
        layers: neighbouring layers, without what they share with others; of tied parameters the first of the layers.
        holders: the workers, ascending, that hold all of the layers; of tied parameters, any.
        tied: all layers that share the parameters; empty unless they are tied.
    """

    layers: LayerRange
    holders: tuple[int, ...]
    tied: tuple[int, ...] = ()

    @property
    def made_by(self) -> tuple[int, ...]:
        """The layers whose backward adds to its gradients."""
        return self.tied or tuple(self.layers)


def gradient_segments(placement: Placement) -> tuple[Segment, ...]:
    """Return the fewest segments that cover all layers, by first layer; `tied_segments` come on top.

    Segments with a single holder are included; they need no message. Raises NoHolderError when a layer has no holder.
    """
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    holders = [placement.holders(layer) for layer in range(placement.num_layers)]
    starts = [layer for layer in range(len(holders)) if not layer or holders[layer] != holders[layer - 1]]
    return tuple(Segment(LayerRange(start, stop), holders[start]) for start, stop in pairwise([*starts, len(holders)]))


def tied_segments(placement: Placement, tied: Iterable[tuple[int, ...]]) -> tuple[Segment, ...]:
    """Return a segment for each set of layers that share parameters.

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
    """Return the bytes of the gradients of a segment."""
    if segment.tied:
        return sum(each.gradient_bytes for each in workload.tied if each.layers == segment.tied)
    return sum(layer.gradient_bytes for layer in workload.layers[segment.layers.start : segment.layers.stop]) - sum(
        each.gradient_bytes for each in workload.tied for layer in each.layers if layer in segment.layers
    )


def issue_points(operations: Sequence[Operation], segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return for each segment the number of operations after which a worker issues its all-reduce.

    By then the worker's own gradients of the segment are complete, and it has issued the segments that come before:
    these may be shared with workers for which they come first.

    Args:
        operations: all that the worker runs in a step, in order.
        segments: the worker's, in the order that all workers share (`SyncRounds.order`).
    """
    points: list[int] = []
    for segment in segments:
        complete = (
            number
            for number, operation in enumerate(operations, start=1)
            if operation.kind in _ADDS_TO_GRADIENTS and any(layer in operation.layers for layer in segment.made_by)
        )
        points.append(max(complete, default=0))
    return tuple(accumulate(points, max))
