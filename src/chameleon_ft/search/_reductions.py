"""What pipelines reduce together, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.sync import gradient_rounds, segment_bytes
from chameleon_ft.workload import Workload


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradients of some layers, which all that hold them reduce.

    Attributes:
        slots: of each holder: stages counted through all pipelines.
        num_bytes: of the gradients.
    """

    slots: tuple[int, ...]
    num_bytes: int


def reductions(stops: Sequence[Sequence[int]], workload: Workload) -> tuple[Reduction, ...]:
    """All of pipelines with these stops, in the order in which every worker issues its own."""
    ranges = (LayerRange(start, stop) for own in stops for start, stop in zip((0, *own[:-1]), own, strict=True))
    placement = Placement(len(workload.layers), {slot: (layers,) for slot, layers in enumerate(ranges)})
    return tuple(
        Reduction(segment.holders, num_bytes)
        for segment in gradient_rounds(placement, workload.tied_layers).order
        if (num_bytes := segment_bytes(segment, workload))
    )
