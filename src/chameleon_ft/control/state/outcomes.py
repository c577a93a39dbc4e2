"""The outcome of each decision, for comparison with its prediction."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.observe import FailureCostRecord, OutcomeRecord
from chameleon_ft.observe.records import FOLLOWED_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutcome:
    """A decision in force, whose outcome has not been reported yet."""

    generation: int
    policy: str
    predicted_step_s: float | None
    predicted_stall_s: float | None
    since: float  # Unix time from which its stall is measured: `Outcomes.since` when it was made
    repeated_s: float  # seconds of committed steps that are repeated
    is_salvaged: bool = False  # whether the interrupted step is completed, so that its commit ends the stall
    stall_s: float | None = None  # None until training has resumed
    steps_s: tuple[float, ...] = ()  # durations of the steps so far


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedStep:
    """A step that incidents have interrupted, until it is committed."""

    step: int
    incident_generations: tuple[int, ...]  # the one after each incident
    since: float  # Unix time of the commit before it
    usual_s: float  # duration of a usual step of the interrupted plan
    predicted_s: float | None  # predicted cost of the last incident, in seconds


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Follows each decision until ten steps are committed, and reports their durations. Times are Unix seconds.

    A stall is measured by the definition of its prediction: all the time without progress, from the last commit before
    the failure to the first operation after it. So it is the stall in the failure's record plus the wasted work of the
    interrupted step. After a return to a checkpoint it also includes the repeated steps, each with the median duration
    of recent steps. If one decision supersedes another before a step is committed, it is charged only with the time
    since the first one. If the interrupted step is completed instead of repeated, the stall is the time by which that
    step took longer than recent ones.

    If a decision is superseded or the run ends before ten steps, the outcome covers the steps so far. Without any step
    there is no outcome.
    """

    pending: PendingOutcome | None = None
    since: float | None = None  # when the latest commit, start, resumption or decision happened
    recent_s: tuple[float, ...] = ()  # durations of recent steps of this generation
    usual_s: float | None = None  # their median; before the first of them as predicted, or that of the plan before
    committed_at: float | None = None  # when the latest commit happened
    interrupted: InterruptedStep | None = None

    def decided(
        self,
        *,
        generation: int,
        policy: str,
        predicted_step_s: float | None,
        predicted_stall_s: float | None,
        repeated_steps: int,
        is_salvaged: bool = False,
        now: float,
    ) -> tuple[Self, OutcomeRecord | None]:
        """Start following a new decision; also return the outcome of the previous one, if there is one.

        Args:
            predicted_step_s: None if nothing was predicted; so is `predicted_stall_s`.
            repeated_steps: committed steps that are repeated.
            is_salvaged: whether the interrupted step is completed.
        """
        pending = PendingOutcome(
            generation=generation,
            policy=policy,
            predicted_step_s=predicted_step_s,
            predicted_stall_s=predicted_stall_s,
            since=(self.committed_at if is_salvaged else self.since) or now,
            is_salvaged=is_salvaged,
            repeated_s=repeated_steps * (self.usual_s or 0.0),
        )
        return replace(self, pending=pending, since=now), self.outcome

    def resumed(self, now: float) -> Self:
        """Note that the first operation of a generation, whose steps may take another time, is about to run."""
        pending, usual_s = self.pending, self.usual_s
        if pending is not None and pending.stall_s is None and not pending.is_salvaged:
            pending = replace(pending, stall_s=max(0.0, now - pending.since) + pending.repeated_s)
        if pending is not None:
            usual_s = pending.predicted_step_s or usual_s
        return replace(self, since=now, pending=pending, recent_s=(), usual_s=usual_s)

    def hit(self, step: int, *, generation: int) -> Self:
        """Note that an incident has interrupted `step`, and that `generation` continues it.

        Nothing is noted before the first commit, because there is nothing to compare with.
        """
        pending, before = self.pending, self.interrupted
        usual_s = self.usual_s if before is None else before.usual_s
        if self.committed_at is None or usual_s is None:
            return self
        predicted_s = None if pending is None else pending.predicted_stall_s
        if predicted_s is not None and pending is not None and not pending.is_salvaged:
            predicted_s += (pending.predicted_step_s or usual_s) - usual_s
        return replace(
            self,
            interrupted=InterruptedStep(
                step=step if before is None else before.step,
                incident_generations=(*(() if before is None else before.incident_generations), generation),
                since=self.committed_at if before is None else before.since,
                usual_s=usual_s,
                predicted_s=predicted_s,
            ),
        )

    def completed_step_s(self, rest_s: float, now: float) -> float:
        """Return the seconds of an interrupted step whose rest took `rest_s`, from the commit before it to now."""
        return rest_s if self.committed_at is None else max(rest_s, now - self.committed_at)

    def cost(self, step: int, now: float) -> tuple[Self, FailureCostRecord | None]:
        """Note the commit of `step`; also return the cost of the incidents before it if it is the interrupted one."""
        hit = self.interrupted
        if hit is None or step < hit.step:
            return self, None
        predicted_steps = None if hit.predicted_s is None else hit.predicted_s / hit.usual_s
        cost_steps = (now - hit.since) / hit.usual_s - 1
        record = FailureCostRecord(
            incident_generations=hit.incident_generations,
            step=hit.step,
            failure_cost_steps=cost_steps,
            predicted_steps=predicted_steps,
        )
        return replace(self, interrupted=None), record

    def committed(self, step_s: float, now: float, *, is_rest: bool = False) -> tuple[Self, OutcomeRecord | None]:
        """Note a committed step; also return the outcome if it is complete.

        `is_rest`: whether the step was interrupted and completed, so that `step_s` is no measure of a step.
        """
        pending = self.pending
        if is_rest:
            if pending is not None and pending.is_salvaged and pending.stall_s is None and self.interrupted is not None:
                pending = replace(pending, stall_s=max(0.0, now - pending.since - self.interrupted.usual_s))
            return replace(self, since=now, committed_at=now, pending=pending), None
        if pending is not None:
            pending = replace(pending, steps_s=(*pending.steps_s, step_s))
        recent_s = (*self.recent_s, step_s)[-FOLLOWED_STEPS:]
        after = replace(
            self,
            since=now,
            committed_at=now,
            recent_s=recent_s,
            usual_s=statistics.median(recent_s),
            pending=pending,
        )
        return after.ended() if pending is not None and len(pending.steps_s) == FOLLOWED_STEPS else (after, None)

    def migrating(self, plan: ActivePlan, now: float) -> Self:
        """Note that layers begin to move, which makes an interrupted step longer, too.

        Its operations take longer, and its vote may wait for the layers.
        """
        hit, pending = self.interrupted, self.pending
        before_s = None if pending is None else pending.predicted_step_s
        if hit is None or hit.predicted_s is None or before_s is None or plan.predicted_step_s is None:
            return self
        predicted_s = hit.predicted_s + max(0.0, plan.predicted_step_s - before_s)
        vote_at = hit.since + hit.usual_s + predicted_s
        held_s = min(plan.hold_s, max(0.0, now + plan.migration_s - vote_at))
        return replace(self, interrupted=replace(hit, predicted_s=predicted_s + held_s))

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
