"""When gradients are reduced: segment by segment, in rounds, during the tail of the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from chameleon_ft.plan import Placement
from chameleon_ft.schedule import CostModel, OperationKind, Timeline
from chameleon_ft.sync import Segment, SyncRounds, gradient_rounds, segment_bytes

__all__ = ["MadeAt", "SyncEstimate", "TimedReduction", "estimate_sync", "sync_after"]

MadeAt: TypeAlias = Mapping[int, Mapping[tuple[int, int], float]]
"""By worker, and by the first layer of a range and the one after its last, when its gradients are made, in seconds."""


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
        rounds: how they are arranged, with the fewest rounds that there could be.
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
        """Seconds by which it makes the step longer."""
        return self.end_s - self.program_s


def estimate_sync(placement: Placement, timeline: Timeline, costs: CostModel) -> SyncEstimate:
    """When each segment is reduced, given when the operations end.

    A worker reduces one segment after the other, in the order (round, first layer), while it computes; a reduction
    starts when all its holders have come to it and have the segment's gradients from all their micro-batches. Where
    there are no gradients, nothing is done. Reductions do not slow down operations or messages.

    Raises:
        NoHolderError: a layer has no holder.
        PlanError: the workload has another number of layers than the placement.
    """
    return sync_after(placement, _made_s(timeline), timeline.step_s, costs)


def sync_after(placement: Placement, made_s: MadeAt, program_s: float, costs: CostModel) -> SyncEstimate:
    """`estimate_sync` from when gradients are made, and the end of the last operation of all."""
    rounds = gradient_rounds(placement, costs.workload.tied_layers)
    free_s: dict[int, float] = {}
    reductions: list[TimedReduction] = []
    for number, segments in enumerate(rounds.rounds):
        for segment in segments:
            num_bytes = segment_bytes(segment, costs.workload)
            if not num_bytes:
                continue
            start_s = max(
                max(free_s.get(worker, 0.0), _ready_s(made_s.get(worker, {}), segment)) for worker in segment.holders
            )
            end_s = start_s + costs.cluster.ring_all_reduce_s(segment.holders, num_bytes)
            free_s.update(dict.fromkeys(segment.holders, end_s))
            reductions.append(TimedReduction(segment, number, start_s, end_s))
    return SyncEstimate(tuple(reductions), rounds, program_s)


def _made_s(timeline: Timeline) -> MadeAt:
    found: dict[int, dict[tuple[int, int], float]] = {}
    for timed in timeline.operations:
        if timed.operation.kind in (OperationKind.BACKWARD, OperationKind.WEIGHT_GRAD):
            layers = timed.operation.layers
            found.setdefault(timed.worker, {})[layers.start, layers.stop] = timed.end_s
    return found


def _ready_s(made_s: Mapping[tuple[int, int], float], segment: Segment) -> float:
    """When a worker has the gradients of a segment."""
    if segment.tied:
        made = (end_s for (start, stop), end_s in made_s.items() if any(start <= each < stop for each in segment.tied))
        return max(made, default=0.0)
    first, behind = segment.layers.start, segment.layers.stop
    return max((end_s for (start, stop), end_s in made_s.items() if start < behind and first < stop), default=0.0)
