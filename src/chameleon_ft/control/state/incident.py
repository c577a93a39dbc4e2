"""An incident: from the first worker lost until training resumes, timed phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from chameleon_ft.control.detectors.process_exit import describe_exit
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.control.state.switches import Migrated
from chameleon_ft.control.wire.messages import Switched
from chameleon_ft.estimate import StallModel
from chameleon_ft.observe import FailureRecord, JoinRecord, NoticedBy

GIVEN_UP: Final = ("watchdog", "heartbeat", "peer")
"""Detection paths on which a worker is given up although its process may run. It is killed afterwards."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that was injected into a worker. Times are Unix seconds."""

    worker: int
    kind: Literal["kill", "hang", "disconnect"]
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a worker. Times are Unix seconds."""

    worker: int
    step: int  # the step that was running
    noticed_by: NoticedBy
    cause: str
    noticed_at: float
    failed_at: float | None  # None if the moment of the failure is not known
    incarnation: int = 1
    host: str = ""

    def describe_cause(
        self,
        *,
        crash: str | None,
        exit_code: int | None,
        fault: Fault | None,
        hung_in: str = "",
        hung_at: str = "",
    ) -> str:
        """Describe the cause of the loss as far as it is known by now.

        Args:
            crash: the error that the worker reported before it ended.
            exit_code: exit code of the worker's process, as in `subprocess`; None if not known.
            fault: the failure that was injected into it, if any.
            hung_in: the activity in which it hung.
            hung_at: the line of code in which it hung.
        """
        if crash is not None:
            return crash
        if self.noticed_by == "checksum":
            return self.cause
        if self.noticed_by in GIVEN_UP:  # so its exit code does not show the cause
            activity = f"; {hung_in}" if hung_in and hung_in not in self.cause else ""
            return f"{self.cause}{activity}{f', at {hung_at}' if hung_at else ''}"
        disconnected = fault is not None and fault.kind == "disconnect"
        return self.cause if exit_code is None or disconnected else describe_exit(exit_code)


@dataclass(frozen=True, slots=True)
class Incident:
    """The losses between two stretches of training, and when each phase of the stall ended. Times are Unix seconds."""

    losses: tuple[Loss, ...] = ()
    ended_at: float = 0.0  # when `Stop` was first sent to the workers; 0 if it was not
    is_switch: bool = False  # whether all switch to another generation, and no worker has to quiesce
    migrated: Migrated = field(default_factory=Migrated)  # what moved during training before that switch
    stopped_at: float = 0.0  # when the last survivor had quiesced
    chosen_at: float = 0.0  # when the plan was chosen; 0 if there was no choice
    looked_up: bool = False  # whether the decision had been prepared
    decided_at: float = 0.0  # when all workers had their orders
    repeated_s: float = 0.0  # seconds of a step whose work is repeated
    is_provisional: bool = False  # whether the plan was chosen without a search
    switched: Switched | None = None  # the report of the first worker that saw the transition complete

    def without(self, worker: int | None) -> Self:
        """Forget the loss of a worker."""
        return replace(self, losses=tuple(loss for loss in self.losses if loss.worker != worker))

    def stall_so_far(self, since: float | None, expected: StallModel) -> tuple[StallModel, float]:
        """Return the phases of the stall, past ones as measured, and the seconds of wasted work before it.

        Together they cover the time since `since`, the last committed step or the last decision. If the moment of a
        failure is not known, the expected delay of its detection is assumed.
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
        active: ActivePlan | None,
        *,
        generation: int,
        resumed_at: float,
        cause_of: Callable[[Loss], str],
        stop: str,
    ) -> list[FailureRecord]:
        """Return a record for each loss.

        Args:
            active: the chosen plan; None if the run had to end.
            resumed_at: when the first operation after the stall began, or the run ended.
            cause_of: returns the cause of a loss, as far as it is known by now.
            stop: why the run had to end, if it did.
        """
        return [
            FailureRecord(
                worker=loss.worker,
                step=loss.step,
                cause=cause_of(loss),
                host=loss.host,
                noticed_by=loss.noticed_by,
                detect_s=None if loss.failed_at is None else max(0.0, loss.noticed_at - loss.failed_at),
                stop_s=max(0.0, self.stopped_at - loss.noticed_at),
                stall_s=resumed_at - (loss.noticed_at if loss.failed_at is None else loss.failed_at),
                policy="stop" if active is None else active.policy,
                action=stop if active is None else active.action,
                resume_step=loss.step if active is None else active.first_step,
                lost_layers=() if active is None else active.lost_layers,
                repeated_s=self.repeated_s,
                is_salvaged=active is not None and active.rest is not None,
                **self._common_fields(active, generation=generation, resumed_at=resumed_at),
            )
            for loss in self.losses
        ]

    def join_record(
        self,
        active: ActivePlan,
        newcomers: Sequence[int],
        *,
        drained: Sequence[int],
        generation: int,
        resumed_at: float,
    ) -> JoinRecord:
        """Return the record of a generation that takes `newcomers` into account, and does without `drained`."""
        return JoinRecord(
            workers=tuple(worker for worker in newcomers if worker in active.plan.workers),
            spares=tuple(worker for worker in newcomers if worker not in active.plan.workers),
            drained=tuple(drained),
            stop_s=max(0.0, self.stopped_at - self.ended_at),
            migrate_s=self.migrated.seconds,
            waves=self.migrated.waves,
            stall_s=max(0.0, resumed_at - self.ended_at),
            policy=active.policy,
            action=active.action,
            resume_step=active.first_step,
            **self._common_fields(active, generation=generation, resumed_at=resumed_at),
        )

    def _common_fields(self, active: ActivePlan | None, *, generation: int, resumed_at: float) -> dict[str, Any]:
        transfer_s = 0.0 if self.switched is None else self.switched.transfer_s
        return {
            "decide_s": max(0.0, self.decided_at - self.stopped_at),
            "regroup_s": max(0.0, resumed_at - self.decided_at - transfer_s),
            "transfer_s": transfer_s,
            "generation": generation,
            "moved_bytes": self.migrated.num_bytes if self.switched is None else self.switched.moved_bytes,
            "rounds": 0 if active is None or active.transfer is None else len(active.transfer.rounds),
        }
