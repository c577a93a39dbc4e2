"""The outcome of each decision, for comparison with its prediction."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.observe import OutcomeRecord

__all__ = ["Outcomes", "PendingOutcome"]

_STEPS: Final = 10  # committed steps after which an outcome is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutcome:
    """A decision in force, whose outcome has not been reported yet."""

    generation: int
    policy: str
    predicted_step_s: float | None
    predicted_stall_s: float | None
    since: float  # Unix time from which its stall is measured: `Outcomes.since` when it was made
    repeated_s: float  # seconds of committed steps that are repeated
    stall_s: float | None = None  # None until training has resumed
    steps_s: tuple[float, ...] = ()  # durations of the steps so far


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Follows each decision until ten steps are committed, and reports their durations. Times are Unix seconds.

    A stall is measured by the definition of its prediction: all the time without progress, from the last commit before
    the failure to the first operation after it. So it is the stall in the failure's record plus the wasted work of the
    interrupted step. After a return to a checkpoint it also includes the repeated steps, each with the median duration
    of recent steps. If one decision supersedes another before a step is committed, it is charged only with the time
    since the first one.

    If a decision is superseded or the run ends before ten steps, the outcome covers the steps so far. Without any step
    there is no outcome.
    """

    pending: PendingOutcome | None = None
    since: float | None = None  # when the latest commit, start, resumption or decision happened
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
        """Start following a new decision; also return the outcome of the previous one, if there is one.

        Args:
            predicted_step_s: None if nothing was predicted; so is `predicted_stall_s`.
            repeated_steps: committed steps that are repeated.
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
        """Note a committed step; also return the outcome if it is complete."""
        pending = self.pending
        if pending is not None:
            pending = replace(pending, steps_s=(*pending.steps_s, step_s))
        after = replace(self, since=now, recent_s=(*self.recent_s, step_s)[-_STEPS:], pending=pending)
        return after.ended() if pending is not None and len(pending.steps_s) == _STEPS else (after, None)

    def ended(self) -> tuple[Self, OutcomeRecord | None]:
        """Stop following the decision in force; also return its outcome if it has not been reported."""
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
