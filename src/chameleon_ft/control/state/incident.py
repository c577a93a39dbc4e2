"""One outage: from the first worker lost until training goes on, timed phase by phase."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chameleon_ft.control.decisions.recovery_plan import Decision
from chameleon_ft.control.wire.messages import Switched
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import FailureRecord, JoinRecord, NoticedBy

__all__ = ["Loss", "Outage", "describe_exit"]


@dataclass(slots=True, kw_only=True)
class Loss:
    """A worker that is lost. Times are Unix seconds."""

    worker: int
    step: int
    noticed_by: NoticedBy
    cause: str
    noticed_at: float
    failed_at: float | None
    """When it failed, where that is known."""
    incarnation: int = 1
    """Which of its incarnations it was."""

    def describe_cause(self, *, crash: str | None, exit_code: int | None, fault: Mapping[str, Any] | None) -> str:
        """Say how the worker was lost, by the best that is known: its own words, its exit, or how it was noticed.

        Args:
            crash: the error it reported before it ended.
            exit_code: how its process ended, as `subprocess` gives it.
            fault: the failure that was injected into it, if any.
        """
        if crash is not None:
            return crash
        # A worker that was given up is killed then; what it was given up for is the cause.
        given_up = self.noticed_by in ("watchdog", "heartbeat", "peer")
        disconnected = fault is not None and fault["kind"] == "disconnect"
        return self.cause if exit_code is None or given_up or disconnected else describe_exit(exit_code)


@dataclass(slots=True)
class Outage:
    """The losses between two stretches of training, and when its phases ended."""

    losses: list[Loss] = field(default_factory=list)
    ended_at: float = 0.0
    """When everyone was told to leave what it was doing, for the first time; 0 where nobody was."""
    paused: bool = False
    """Whether that was at the end of a step, as everyone had been told to."""
    stopped_at: float = 0.0
    """When the last survivor had left its operation."""
    weighed_at: float = 0.0
    """When it was known what was chosen; 0 where there was nothing to choose."""
    looked_up: bool = False
    """Whether that had been weighed beforehand."""
    decided_at: float = 0.0
    """When everyone had been told."""
    switched: Switched | None = None
    """What the first worker said that saw the transition complete."""

    def stall_so_far(self, since: float | None, expected: StallModel) -> tuple[StallModel, float]:
        """The phases of the stall, those that are over as they were; and the work before it that is done again.

        They sum up to all the time since `since`, when the last step was committed or the last decision made, and what
        is still to come. The moment of a failure that is not known is taken to be as long ago as is expected.
        """
        since = self.stopped_at if since is None else since
        noticed_at = min((loss.noticed_at for loss in self.losses if loss.noticed_at >= since), default=self.stopped_at)
        failed_at = min(
            (loss.failed_at for loss in self.losses if loss.failed_at is not None and loss.failed_at >= since),
            default=max(since, noticed_at - expected.detect_s),
        )
        failed_at = min(failed_at, noticed_at)
        phases = replace(expected, detect_s=noticed_at - failed_at, stop_s=max(0.0, self.stopped_at - noticed_at))
        return phases, max(0.0, failed_at - since)

    def records(
        self,
        decision: Decision | None,
        *,
        generation: int,
        resumed_at: float,
        cause_of: Callable[[Loss], str],
        stop: str,
    ) -> list[FailureRecord]:
        """Return a record for each loss.

        Args:
            decision: what was decided; None where the run had to end.
            resumed_at: when the first operation was run again, or the run ended.
            cause_of: what is known by now of why a worker was lost.
            stop: why the run had to end, where it had.
        """
        return [
            FailureRecord(
                worker=loss.worker,
                step=loss.step,
                cause=cause_of(loss),
                noticed_by=loss.noticed_by,
                detect_s=None if loss.failed_at is None else max(0.0, loss.noticed_at - loss.failed_at),
                stop_s=max(0.0, self.stopped_at - loss.noticed_at),
                decide_s=max(0.0, self.decided_at - self.stopped_at),
                regroup_s=max(0.0, resumed_at - self.decided_at - self._transfer_s),
                transfer_s=self._transfer_s,
                stall_s=resumed_at - (loss.noticed_at if loss.failed_at is None else loss.failed_at),
                policy="stop" if decision is None else decision.policy,
                action=stop if decision is None else decision.action,
                generation=generation,
                resume_step=loss.step if decision is None else decision.first_step,
                lost_layers=() if decision is None else decision.lost_layers,
                moved_bytes=0 if self.switched is None else self.switched.moved_bytes,
                rounds=(
                    0 if decision is None or decision.transition is None else len(decision.transition.transfer.rounds)
                ),
            )
            for loss in self.losses
        ]

    def join_record(
        self, decision: Decision, newcomers: Sequence[int], *, generation: int, resumed_at: float
    ) -> JoinRecord:
        """Return the record of a stop that `newcomers` were reckoned with in; see `records`."""
        return JoinRecord(
            workers=tuple(worker for worker in newcomers if worker in decision.plan.workers),
            spares=tuple(worker for worker in newcomers if worker not in decision.plan.workers),
            stop_s=max(0.0, self.stopped_at - self.ended_at),
            decide_s=max(0.0, self.decided_at - self.stopped_at),
            regroup_s=max(0.0, resumed_at - self.decided_at - self._transfer_s),
            transfer_s=self._transfer_s,
            stall_s=max(0.0, resumed_at - self.ended_at),
            policy=decision.policy,
            action=decision.action,
            generation=generation,
            resume_step=decision.first_step,
            moved_bytes=0 if self.switched is None else self.switched.moved_bytes,
            rounds=0 if decision.transition is None else len(decision.transition.transfer.rounds),
        )

    @property
    def _transfer_s(self) -> float:
        return 0.0 if self.switched is None else self.switched.transfer_s


def describe_exit(exit_code: int) -> str:
    """Say how a process ended, from its exit code as `subprocess` gives it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
