"""When gradients are reduced: segment by segment, in rounds, during the tail of the backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TypeAlias

from chameleon_ft.plan import Placement
from chameleon_ft.schedule import CostModel, OperationKind, Timeline
from chameleon_ft.sync import Segment, SyncRounds, gradient_rounds, segment_bytes

GradientTimes: TypeAlias = Mapping[int, Mapping[tuple[int, int], float]]
"""By worker, and by the (start, stop) of a range of layers, when its gradients are complete, in seconds."""


@dataclass(frozen=True, slots=True)
class TimedReduction:
    """The all-reduce of a segment, in seconds since the start of the step, and the number of its round."""

    segment: Segment
    round: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SyncEstimate:
    """The reductions of a step.

    Attributes:
        reductions: in the order in which workers issue them; segments without gradients are not among them.
        rounds: their arrangement, with a lower bound on the number of rounds.
        program_s: end of the last operation.
    """

    reductions: tuple[TimedReduction, ...]
    rounds: SyncRounds
    program_s: float

    @property
    def end_s(self) -> float:
        """When all gradients are reduced and all operations done."""
        return max([self.program_s, *(reduction.end_s for reduction in self.reductions)])

    @property
    def exposed_s(self) -> float:
        """Seconds by which gradient sync makes the step longer."""
        return self.end_s - self.program_s


def estimate_sync(placement: Placement, timeline: Timeline, costs: CostModel) -> SyncEstimate:
    """Predict when each segment is reduced, given when the operations end.

    A worker reduces one segment after the other, in the order (round, first layer), while it computes; a reduction
    starts when all its holders have come to it and have the segment's gradients from all their micro-batches. Segments
    without gradients are skipped. Reductions do not slow down operations or messages.

    Raises:
        NoHolderError: a layer has no holder.
        PlanError: the workload has another number of layers than the placement.
    """
    complete_s: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for timed in timeline.operations:
        if timed.operation.kind in (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD):
            layers = timed.operation.layers
            complete_s[timed.worker][layers.start, layers.stop] = timed.end_s
    return sync_after(placement, complete_s, timeline.step_s, costs)


def sync_after(placement: Placement, complete_s: GradientTimes, program_s: float, costs: CostModel) -> SyncEstimate:
    """Return `estimate_sync` from when gradients are complete, and the end of the last operation of all."""
    rounds = gradient_rounds(placement, costs.workload.tied_layers)
    segments = [
        (number, segment, num_bytes)
        for number, own in enumerate(rounds.rounds)
        for segment in own
        if (num_bytes := segment_bytes(segment, costs.workload))
    ]
    times = reduction_times(
        (
            (
                segment.holders,
                max(_ready_s(complete_s.get(worker, {}), segment) for worker in segment.holders),
                costs.all_reduce_s(segment.layers, segment.holders, num_bytes),
            )
            for _, segment, num_bytes in segments
        ),
        defaultdict(float),
    )
    reductions = (
        TimedReduction(segment, number, start_s, end_s)
        for (number, segment, _), (start_s, end_s) in zip(segments, times, strict=True)
    )
    return SyncEstimate(tuple(reductions), rounds, program_s)


def reduction_times(
    reductions: Iterable[tuple[Collection[int], float, float]], free_s: MutableMapping[int, float]
) -> Iterator[tuple[float, float]]:
    """Yield start and end of reductions in the order in which all workers issue them, in seconds.

    Args:
        reductions: of each its holders, when its gradients are complete on all of them, and its duration.
        free_s: when each holder can begin its first reduction; updated as the reductions end.
    """
    for holders, ready_s, duration_s in reductions:
        start_s = max(ready_s, *[free_s[holder] for holder in holders])
        end_s = start_s + duration_s
        for holder in holders:
            free_s[holder] = end_s
        yield start_s, end_s


def _ready_s(complete_s: Mapping[tuple[int, int], float], segment: Segment) -> float:
    """When a worker has the gradients of a segment."""
    spans = [(layer, layer + 1) for layer in segment.tied] or [(segment.layers.start, segment.layers.stop)]
    return max(
        (
            end_s
            for (start, stop), end_s in complete_s.items()
            if any(start < last and first < stop for first, last in spans)
        ),
        default=0.0,
    )
