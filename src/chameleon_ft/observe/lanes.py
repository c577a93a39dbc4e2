"""A timeline of a step with its gradient reductions, as pictures and traces show it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from chameleon_ft.estimate import StepEstimate
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import TimedOperation, Timeline


@dataclass(frozen=True, slots=True)
class WorkerReduction:
    """One worker's part in the all-reduce of the gradients of `layers`, in seconds since the start of the step."""

    worker: int
    layers: LayerRange
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One timeline of a step; `name` is "predicted" or "measured", and `reductions` is empty if they are unknown."""

    name: str
    timeline: Timeline
    reductions: tuple[WorkerReduction, ...] = ()

    @classmethod
    def predicted(cls, estimate: StepEstimate) -> Lane:
        """Return the predicted timeline of a step."""
        reductions = tuple(
            WorkerReduction(worker, reduction.segment.layers, reduction.start_s, reduction.end_s)
            for reduction in estimate.sync.reductions
            for worker in reduction.segment.holders
        )
        return cls("predicted", estimate.timeline, reductions)

    @property
    def program_s(self) -> float:
        """Seconds until the last operation has ended."""
        return self.timeline.step_s

    @property
    def step_s(self) -> float:
        """Seconds until all operations have ended and all gradients are reduced."""
        return max([self.program_s, *(reduction.end_s for reduction in self.reductions)])

    def operations(self) -> dict[int, list[TimedOperation]]:
        """Return the operations of each worker that has any, in its order."""
        found: dict[int, list[TimedOperation]] = defaultdict(list)
        for timed in self.timeline.operations:
            found[timed.worker].append(timed)
        return dict(found)

    def busy(self) -> dict[int, float]:
        """Return for each worker with operations the share of `program_s` in which it computes."""
        return {
            worker: math.fsum(timed.end_s - timed.start_s for timed in own) / self.program_s if self.program_s else 0.0
            for worker, own in self.operations().items()
        }
