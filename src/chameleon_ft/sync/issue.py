"""When a worker may begin to reduce a segment: as soon as it has run all that adds to the segment's gradients."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.sync.segments import Segment

__all__ = ["issue_points"]

_ADDS_TO_GRADIENTS = (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD)


def issue_points(operations: Sequence[Operation], segments: Sequence[Segment]) -> tuple[int, ...]:
    """For each segment, after how many of its operations a worker issues the all-reduce of it.

    That is once its own gradients of the segment are complete, and not before it has issued the segments that come
    before: these may be shared with workers for which they come first.

    Args:
        operations: all that the worker runs in a step, in order.
        segments: those that it holds, in the order that all workers share (`SyncRounds.order`).
    """
    points: list[int] = []
    for segment in segments:
        complete = max(
            (
                number
                for number, operation in enumerate(operations, start=1)
                if operation.kind in _ADDS_TO_GRADIENTS and any(layer in operation.layers for layer in segment.made_by)
            ),
            default=0,
        )
        points.append(max([complete, *points[-1:]]))
    return tuple(points)
