"""What pictures and traces show: the timelines of a step, each under its name and with its gradient reductions."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from chameleon_ft.estimate import StepEstimate
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import TimedOperation, Timeline

__all__ = ["Lane", "WorkerReduction"]


@dataclass(frozen=True, slots=True)
class WorkerReduction:
    """One worker's part in the all-reduce of the gradients of `layers`, in seconds since the start of the step."""

    worker: int
    layers: LayerRange
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One timeline of a step.

    Attributes:
        name: what it is called, such as "predicted" or "measured".
        timeline: when each operation starts and ends.
        reductions: when gradients are reduced; none where that is not known.
    """

    name: str
    timeline: Timeline
    reductions: tuple[WorkerReduction, ...] = ()

    @classmethod
    def predicted(cls, estimate: StepEstimate) -> Lane:
        """What is predicted of a step."""
        return cls(
            name="predicted",
            timeline=estimate.timeline,
            reductions=tuple(
                WorkerReduction(worker, reduction.segment.layers, reduction.start_s, reduction.end_s)
                for reduction in estimate.sync.reductions
                for worker in reduction.segment.holders
            ),
        )

    @property
    def program_s(self) -> float:
        """Seconds until the last operation has ended."""
        return self.timeline.step_s

    @property
    def step_s(self) -> float:
        """Seconds until all operations have ended and all gradients are reduced."""
        return max([self.program_s, *(reduction.end_s for reduction in self.reductions)])

    def operations(self) -> dict[int, list[TimedOperation]]:
        """The operations of each worker that has some, in its order."""
        found: dict[int, list[TimedOperation]] = defaultdict(list)
        for timed in self.timeline.operations:
            found[timed.worker].append(timed)
        return dict(found)

    def busy(self) -> dict[int, float]:
        """For each worker that has operations, the share of the time until the last has ended in which it computes."""
        return {
            worker: math.fsum(timed.end_s - timed.start_s for timed in own) / self.program_s if self.program_s else 0.0
            for worker, own in self.operations().items()
        }
