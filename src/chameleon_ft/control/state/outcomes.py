"""The outcome of each decision, for comparison with its prediction."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.observe import OutcomeRecord

__all__ = ["Outcomes", "PendingOutcome"]

_STEPS: Final = 10  # after which the outcome is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutcome:
    """A decision that is being carried out."""

    generation: int
    policy: str
    predicted_step_s: float | None
    predicted_stall_s: float | None
    since: float  # Unix time of the last committed step that counts
    repeated_s: float  # seconds of committed steps that are run again
    stall_s: float | None = None  # None until training has resumed
    steps_s: tuple[float, ...] = ()  # durations of the steps so far


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Follows each decision until ten steps are committed, and reports their durations. Times are Unix seconds.

    A stall is measured as it is predicted: all the time without progress, from the last committed step that counts to
    the next operation. So it is the stall of the failure's record, preceded by the work of the interrupted step that is
    repeated; after a return to a checkpoint, also the steps that are repeated, each as long as the median of recent
    ones. A decision that follows another before any step is only charged with the time after that one.

    A decision that is overtaken by another one, or by the end of the run, is reported with its steps so far, or not at
    all if there are none."""

    pending: PendingOutcome | None = None
    since: float | None = None  # latest step, start, resumption or decision
    recent_s: tuple[float, ...] = ()  # durations of recent steps

    def decided(
        self,
        *,
        generation: int,
        policy: str,
        predicted_step_s: float | None,
        predicted_stall_s: float | None,
        repeated_steps: int,
        now: float,
    ) -> tuple[Self, OutcomeRecord | None]:
        """Follow a new decision; return also the outcome of the one before, if there is one.

        Args:
            predicted_step_s: None, like `predicted_stall_s`, if nothing was predicted.
            repeated_steps: steps that had been committed and are run again.
        """
        pending = PendingOutcome(
            generation=generation,
            policy=policy,
            predicted_step_s=predicted_step_s,
            predicted_stall_s=predicted_stall_s,
            since=now if self.since is None else self.since,
            repeated_s=repeated_steps * statistics.median(self.recent_s) if self.recent_s else 0.0,
        )
        return replace(self, pending=pending, since=now), self.outcome

    def resumed(self, now: float) -> Self:
        """Note that the first operation of a generation is about to run."""
        pending = self.pending
        if pending is not None and pending.stall_s is None:
            pending = replace(pending, stall_s=max(0.0, now - pending.since) + pending.repeated_s)
        return replace(self, since=now, pending=pending)

    def committed(self, step_s: float, now: float) -> tuple[Self, OutcomeRecord | None]:
        """Note a committed step; return also the outcome if it is complete."""
        pending = self.pending
        if pending is not None:
            pending = replace(pending, steps_s=(*pending.steps_s, step_s))
        after = replace(self, since=now, recent_s=(*self.recent_s, step_s)[-_STEPS:], pending=pending)
        return after.ended() if pending is not None and len(pending.steps_s) == _STEPS else (after, None)

    def ended(self) -> tuple[Self, OutcomeRecord | None]:
        """Stop following the decision in force; return also its outcome, if it was not reported."""
        return replace(self, pending=None), self.outcome

    @property
    def outcome(self) -> OutcomeRecord | None:
        """The outcome of the decision in force so far; None if there is nothing to report."""
        pending = self.pending
        if pending is None or pending.stall_s is None or not pending.steps_s:
            return None
        # The first step also allocates buffers and opens connections.
        usual_s = pending.steps_s[1:] or pending.steps_s
        return OutcomeRecord(
            generation=pending.generation,
            policy=pending.policy,
            steps=len(pending.steps_s),
            predicted_step_s=pending.predicted_step_s,
            measured_step_s=statistics.median(usual_s),
            predicted_stall_s=pending.predicted_stall_s,
            measured_stall_s=pending.stall_s,
        )
