"""What came of each decision, to be laid beside what was predicted of it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from chameleon_ft.observe import OutcomeRecord
from chameleon_ft.recovery import Candidate

__all__ = ["Outcomes"]

_STEPS: Final = 10  # after which it is said what came


@dataclass(slots=True, kw_only=True)
class _Pending:
    generation: int
    policy: str
    predicted_step_s: float | None
    predicted_stall_s: float | None
    since: float
    repeated_s: float
    stall_s: float | None = None
    steps_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Outcomes:
    """Follows each decision until ten steps are committed, and reports what they took. Nothing here reads a clock.

    A stall is measured as it is predicted: all the time in which nothing is gained. It begins when the last step was
    committed that counts, and ends with the first operation thereafter. So it is the stall of the failure's record,
    and before that the work of the interrupted step that is done again; after a return to a checkpoint, also the steps
    that are repeated, each as long as the median of recent ones. A decision that follows another before any step is
    only charged with what comes after that one.

    A decision that is overtaken by another one, or by the end of the run, is reported with the steps that there are, or
    not at all if there are none.
    """

    report: Callable[[OutcomeRecord], None]
    _pending: _Pending | None = None
    _since: float | None = None
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))

    @property
    def since(self) -> float | None:
        """When the last step was committed, training began or went on, or the last decision was made: the latest."""
        return self._since

    def begun(self, now: float) -> None:
        """The first generation has its orders."""
        self._since = now

    def decided(
        self, *, generation: int, policy: str, predicted: Candidate | None, repeated_steps: int, now: float
    ) -> None:
        """A decision is carried out from here on.

        Args:
            predicted: what is chosen; None where nothing was predicted.
            repeated_steps: steps that had been committed and are run again.
        """
        self.end()
        self._pending = _Pending(
            generation=generation,
            policy=policy,
            predicted_step_s=None if predicted is None else predicted.step_s,
            predicted_stall_s=None if predicted is None else predicted.stall_s,
            since=now if self._since is None else self._since,
            repeated_s=repeated_steps * statistics.median(self._recent_s) if self._recent_s else 0.0,
        )
        self._since = now

    def resumed(self, now: float) -> None:
        """The first operation of a generation is about to be run."""
        self._since = now
        if self._pending is not None and self._pending.stall_s is None:
            self._pending.stall_s = max(0.0, now - self._pending.since) + self._pending.repeated_s

    def committed(self, step_s: float, now: float) -> None:
        """A step was committed."""
        self._since = now
        self._recent_s.append(step_s)
        if self._pending is None:
            return
        self._pending.steps_s.append(step_s)
        if len(self._pending.steps_s) == _STEPS:
            self.end()

    def end(self) -> None:
        """Report what has come of the decision in force by now, if it has not been reported."""
        pending, self._pending = self._pending, None
        if pending is None or pending.stall_s is None or not pending.steps_s:
            return
        # In the first step buffers and connections are made.
        usual_s = pending.steps_s[1:] or pending.steps_s
        self.report(
            OutcomeRecord(
                generation=pending.generation,
                policy=pending.policy,
                steps=len(pending.steps_s),
                predicted_step_s=pending.predicted_step_s,
                measured_step_s=statistics.median(usual_s),
                predicted_stall_s=pending.predicted_stall_s,
                measured_stall_s=pending.stall_s,
            )
        )
