"""What came of each decision, to be laid beside what was predicted of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.observe import OutcomeRecord

__all__ = ["Outcomes", "PendingOutcome"]

_STEPS: Final = 10  # after which the outcome is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutcome:
    """A decision that is being carried out.

    Attributes:
        since: when the last step was committed that counts, in Unix seconds.
        repeated_s: seconds of committed steps that are run again.
        stall_s: None until training has resumed.
        steps_s: durations of the steps so far.
    """

    generation: int
    policy: str
    predicted_step_s: float | None
    predicted_stall_s: float | None
    since: float
    repeated_s: float
    stall_s: float | None = None
    steps_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Follows each decision until ten steps are committed, and reports what they took. Times are Unix seconds.

    A stall is measured as it is predicted: all the time in which nothing is gained. It begins when the last step was
    committed that counts, and ends with the first operation thereafter. So it is the stall of the failure's record,
    and before that the work of the interrupted step that is done again; after a return to a checkpoint, also the steps
    that are repeated, each as long as the median of recent ones. A decision that follows another before any step is
    only charged with what comes after that one.

    A decision that is overtaken by another one, or by the end of the run, is reported with the steps that there are, or
    not at all if there are none.

    Attributes:
        since: when the last step was committed, training began or resumed, or the last decision was made: the latest.
        recent_s: durations of recent steps.
    """

    pending: PendingOutcome | None = None
    since: float | None = None
    recent_s: tuple[float, ...] = ()

    def begun(self, now: float) -> Self:
        """The first generation gets its orders."""
        return replace(self, since=now)

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
        """A decision is carried out from here on; return also the outcome of the one before, if it has one.

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
        """The first operation of a generation is about to be run."""
        pending = self.pending
        if pending is not None and pending.stall_s is None:
            pending = replace(pending, stall_s=max(0.0, now - pending.since) + pending.repeated_s)
        return replace(self, since=now, pending=pending)

    def committed(self, step_s: float, now: float) -> tuple[Self, OutcomeRecord | None]:
        """A step was committed; return also the outcome that it completes, if it does."""
        after = replace(self, since=now, recent_s=(*self.recent_s, step_s)[-_STEPS:])
        if self.pending is None:
            return after, None
        after = replace(after, pending=replace(self.pending, steps_s=(*self.pending.steps_s, step_s)))
        return after.ended() if after.pending and len(after.pending.steps_s) == _STEPS else (after, None)

    def ended(self) -> tuple[Self, OutcomeRecord | None]:
        """Return the outcome of the decision in force, if it has one that was not reported, and wait for no more."""
        return replace(self, pending=None), self.outcome

    @property
    def outcome(self) -> OutcomeRecord | None:
        """What has come of the decision in force by now; None if there is nothing to report."""
        pending = self.pending
        if pending is None or pending.stall_s is None or not pending.steps_s:
            return None
        # In the first step buffers and connections are made.
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
