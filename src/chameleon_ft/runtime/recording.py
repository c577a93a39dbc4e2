"""Writing down when the operations of a step were, and telling the coordinator how long they took."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from chameleon_ft.control.wire.messages import OperationTimes
from chameleon_ft.observe import RecordedReduction, RecordedStep, TimelineLog
from chameleon_ft.runtime.commit import CommitTimes
from chameleon_ft.runtime.executor import StepSums
from chameleon_ft.schedule import OperationKind

__all__ = ["StepRecorder", "StepStart", "operation_times"]

_AFTER_A_CHANGE = 2  # steps of a new generation that are recorded whatever their number


@dataclass(frozen=True, slots=True)
class StepStart:
    """When a step began, by two clocks at once."""

    clock_s: float
    """By `time.perf_counter`, as everything that is recorded of the step."""
    unix_s: float

    @classmethod
    def now(cls) -> StepStart:
        """The present."""
        return cls(time.perf_counter(), time.time())

    @property
    def passed_s(self) -> float:
        """Seconds since then."""
        return time.perf_counter() - self.clock_s


class StepRecorder:
    """Writes the steps of one worker to `log`: each whose number `every` divides, and the first after a change.

    With `every` = 0 it writes none.
    """

    def __init__(self, log: TimelineLog, *, worker: int, every: int) -> None:
        self._log = log
        self._worker = worker
        self._every = every

    def wants(self, step: int, *, first_step: int) -> bool:
        """Whether this step of a generation that began with `first_step` is to be written."""
        return self._every > 0 and (step % self._every == 0 or step < first_step + _AFTER_A_CHANGE)

    def record(self, step: int, sums: StepSums, times: CommitTimes, *, generation: int, start: StepStart) -> None:
        """Write down a step. Training does not depend on it: where it fails, that is said and no more."""
        try:
            self._log.append(self._recorded(step, sums, times, generation=generation, start=start))
        except OSError as error:
            print(f"the operations of step {step} cannot be written down: {error}", file=sys.stderr, flush=True)

    def _recorded(
        self, step: int, sums: StepSums, times: CommitTimes, *, generation: int, start: StepStart
    ) -> RecordedStep:
        origin_s = start.clock_s
        return RecordedStep(
            generation=generation,
            step=step,
            worker=self._worker,
            time=start.unix_s,
            operations=tuple((begun - origin_s, ended - origin_s) for _, begun, ended in sums.spans),
            reductions=tuple(
                RecordedReduction(
                    reduction.segment.layers.start,
                    reduction.segment.layers.stop,
                    reduction.start_s - origin_s,
                    reduction.end_s - origin_s,
                )
                for reduction in times.reductions
            ),
            vote_s=(times.vote_s[0] - origin_s, times.vote_s[1] - origin_s),
            end_s=times.end_s - origin_s,
        )


def operation_times(sums: StepSums) -> OperationTimes:
    """What the coordinator is told of the operations of a step; the halves of a split backward count as one."""
    return OperationTimes(
        forward_s=sums.median_s(OperationKind.FORWARD),
        backward_s=sums.median_s(OperationKind.BACKWARD)
        or sums.median_s(OperationKind.INPUT_GRAD) + sums.median_s(OperationKind.WEIGHT_GRAD),
        longest_s=sums.longest_s,
    )
