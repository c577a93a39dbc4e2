"""An incident: from the first worker lost until training resumes, timed phase by phase.

The failures that a run has seen so far, and the failure model learned from them.

The outcome of each decision, for comparison with its prediction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.detectors.process import describe_exit
from chameleon_ft.coordinator.state.switches import Migrated
from chameleon_ft.cost.transition import ConnectionModel, StallModel
from chameleon_ft.events.records import (
    FOLLOWED_STEPS,
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    NoticedBy,
    OutcomeRecord,
)
from chameleon_ft.plan.frozen_map import FrozenMap, without
from chameleon_ft.protocol.messages import Switched
from chameleon_ft.recovery import FailureModel
from chameleon_ft.recovery.generation import GenerationSpec

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
    # The step that was running.
    step: int
    noticed_by: NoticedBy
    cause: str
    noticed_at: float
    # None if it is not known.
    failed_at: float | None
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
        # Its exit code does not show the cause.
        if self.noticed_by in GIVEN_UP:
            activity = f"; {hung_in}" if hung_in and hung_in not in self.cause else ""
            return f"{self.cause}{activity}{f', at {hung_at}' if hung_at else ''}"
        disconnected = fault is not None and fault.kind == "disconnect"
        return self.cause if exit_code is None or disconnected else describe_exit(exit_code)


@dataclass(frozen=True, slots=True)
class Incident:
    """The losses between two stretches of training, and when each phase of the stall ended. Times are Unix seconds."""

    losses: tuple[Loss, ...] = ()
    # When `Stop` was first sent to the workers; 0 if it was not.
    ended_at: float = 0.0
    # Whether all switch to another generation, and no worker has to quiesce.
    is_switch: bool = False
    # The layers that moved during training before that switch.
    migrated: Migrated = field(default_factory=Migrated)
    # When the last survivor had quiesced.
    stopped_at: float = 0.0
    # When the plan was chosen; 0 if there was no choice.
    chosen_at: float = 0.0
    # Whether the decision had been prepared.
    looked_up: bool = False
    # When all workers had their orders.
    decided_at: float = 0.0
    # The part of a step whose work is repeated.
    repeated_s: float = 0.0
    # Whether the plan was chosen without a search.
    is_provisional: bool = False
    # The report of the first worker that saw the transition complete.
    switched: Switched | None = None

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
        active: GenerationSpec | None,
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
        active: GenerationSpec,
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

    def _common_fields(self, active: GenerationSpec | None, *, generation: int, resumed_at: float) -> dict[str, Any]:
        transfer_s = 0.0 if self.switched is None else self.switched.transfer_s
        return {
            "decide_s": max(0.0, self.decided_at - self.stopped_at),
            "regroup_s": max(0.0, resumed_at - self.decided_at - transfer_s),
            "transfer_s": transfer_s,
            "generation": generation,
            "moved_bytes": self.migrated.num_bytes if self.switched is None else self.switched.moved_bytes,
            "rounds": 0 if active is None or active.transfer is None else len(active.transfer.rounds),
        }


_DEFAULT = StallModel(detect_s=0.01, stop_s=0.03, decide_s=0.05, regroup_s=0.02)
"""Phases assumed until a stall has been measured; typical of a machine with two processors."""
# Each worker adds this to the time in which communicators are formed.
_DEFAULT_REGROUP_S: Final = 0.003
_DEFAULT_REGROUP_MAX_S: Final = 0.2
_DEFAULT_HAND_OUT_S: Final = 0.01

# Losses at most this far apart belong to one incident. They may not be detected at the same moment, but they are
# detected within about one heartbeat interval.
_TOGETHER_S: Final = 2.0
# The medians of so many stalls, and decisions, count.
_RECENT: Final = 64


@dataclass(frozen=True, slots=True)
class LatestIncident:
    """The latest losses, close together in time; further losses may still be added."""

    # Since the previous incident; None for the first.
    gap_s: float | None
    # When the last worker was lost.
    lost_at: float
    # The number of workers lost so far, by host.
    lost: Mapping[str, int] = FrozenMap({})
    # Hosts that lost workers; a host that comes back and loses workers again counts again.
    failures: int = 0
    # Hosts that lost all their workers, two or more.
    host_failures: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lost", FrozenMap(self.lost))

    def with_loss(self, host: str, live_hosts: Collection[str], now: float) -> Self:
        """Add the loss of a worker; see `FailureHistory.failed`."""
        count = self.lost.get(host, 0) + 1
        is_whole = count > 1 and host not in live_hosts
        lost = without(self.lost, host)
        return replace(
            self,
            lost_at=now,
            lost=lost if is_whole else {**lost, host: count},
            failures=self.failures + (count == 1),
            host_failures=self.host_failures + is_whole,
        )


@dataclass(frozen=True, slots=True)
class PastStall:
    """Durations of the phases of a stall; see `FailureRecord`."""

    detect_s: float | None
    stop_s: float
    regroup_s: float


@dataclass(frozen=True, slots=True)
class PastDecision:
    """Duration of a decision, and of its last part, in which the orders were sent."""

    looked_up: bool
    decide_s: float
    hand_out_s: float


@dataclass(frozen=True, slots=True)
class PastConnection:
    """New communicators between the devices of a worker and others, and how long they took."""

    generation: int
    formed: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHistory:
    """Counts failures and worker-seconds, and keeps recent durations. Times are in seconds."""

    # The failure model of all incidents but the latest, which may still grow.
    settled: FailureModel
    # The number of live workers.
    workers: int = 0
    # When `workers` last changed.
    since: float | None = None
    latest: LatestIncident | None = None
    stalls: tuple[PastStall, ...] = ()
    decisions: tuple[PastDecision, ...] = ()
    connections: tuple[PastConnection, ...] = ()

    @classmethod
    def before(cls, recovery: Recovery) -> Self:
        """Return the history of a run that has not begun."""
        return cls(
            settled=FailureModel(
                worker_mtbf_s=recovery.worker_mtbf_hours * 3600,
                prior_failures=recovery.prior_weight,
                prior_host_failure_fraction=recovery.host_failure_fraction,
            )
        )

    def live(self, workers: int, now: float) -> Self:
        """Note the number of live workers from `now` on."""
        settled = self.settled
        if self.since is not None:
            settled = settled.observed(worker_s=self.workers * max(0.0, now - self.since))
        return replace(self, settled=settled, workers=workers, since=now)

    def failed(self, host: str, live_hosts: Collection[str], now: float) -> Self:
        """Note the loss of a worker on `host`; `live_hosts` are the hosts of the live workers, one per worker."""
        history = self.live(len(live_hosts), now)
        latest = history.latest
        if latest is None or now - latest.lost_at > _TOGETHER_S:
            history = replace(history, settled=history.rate)
            latest = LatestIncident(None if latest is None else now - latest.lost_at, now)
        return replace(history, latest=latest.with_loss(host, live_hosts, now))

    def resumed(self, record: FailureRecord) -> Self:
        """Note the stall of a loss, once training has resumed."""
        past = PastStall(record.detect_s, record.stop_s, record.regroup_s)
        return replace(self, stalls=(*self.stalls, past)[-_RECENT:])

    def connected(self, generation: int, formed: int, seconds: float) -> tuple[Self, float | None]:
        """Note that the devices of a worker are connected; return the prediction by the generations before, too."""
        model = ConnectionModel.fitted((e.formed, e.seconds) for e in self.connections if e.generation < generation)
        past = PastConnection(generation, formed, seconds)
        history = replace(self, connections=(*self.connections, past)[-_RECENT:])
        return history, None if model is None else model.connect_s(formed)

    def decided(self, *, looked_up: bool, decide_s: float, hand_out_s: float) -> Self:
        """Note a decision that was carried out.

        Args:
            looked_up: True if it had been prepared.
            decide_s: seconds from the quiescing of the last worker until the orders were sent.
            hand_out_s: the part of `decide_s` after the decision was made.
        """
        return replace(self, decisions=(*self.decisions, PastDecision(looked_up, decide_s, hand_out_s))[-_RECENT:])

    @property
    def rate(self) -> FailureModel:
        """The failure model with the latest incident included."""
        latest = self.latest
        if latest is None:
            return self.settled
        gap_s = math.inf if latest.gap_s is None else latest.gap_s
        return self.settled.observed(failures=latest.failures, host_failures=latest.host_failures, gap_s=gap_s)

    def hand_out_s(self, *, looked_up: bool) -> float:
        """Median seconds from a decision until its orders are sent; over all decisions if none is of this kind."""
        own = [each.hand_out_s for each in self.decisions if each.looked_up == looked_up]
        return _median(own or (each.hand_out_s for each in self.decisions), default=_DEFAULT_HAND_OUT_S)

    def phases(self, *, looked_up: bool) -> StallModel:
        """Return the expected phases of the next stall: medians of the past ones.

        Args:
            looked_up: whether the decision will have been prepared; a search takes much longer.
        """
        stalls = self.stalls
        decided = (each.decide_s for each in self.decisions if each.looked_up == looked_up)
        detected = (stall.detect_s for stall in stalls if stall.detect_s is not None)
        default_regroup_s = min(_DEFAULT_REGROUP_MAX_S, _DEFAULT.regroup_s + _DEFAULT_REGROUP_S * self.workers)
        return StallModel(
            detect_s=_median(detected, default=_DEFAULT.detect_s),
            stop_s=_median((stall.stop_s for stall in stalls), default=_DEFAULT.stop_s),
            decide_s=_median(decided, default=_DEFAULT.decide_s),
            regroup_s=_median((stall.regroup_s for stall in stalls), default=default_regroup_s),
        )


def _median(values: Iterable[float], *, default: float) -> float:
    return statistics.median(found) if (found := list(values)) else default


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutcome:
    """A decision in force, whose outcome has not been reported yet."""

    generation: int
    policy: str
    predicted_step_s: float | None
    predicted_stall_s: float | None
    # The stall is measured from this Unix time: `Outcomes.since` when the decision was made.
    since: float
    # The duration of committed steps that are repeated.
    repeated_s: float
    # Whether the interrupted step is completed, so that its commit ends the stall.
    is_salvaged: bool = False
    # None until training has resumed.
    stall_s: float | None = None
    steps_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedStep:
    """A step that incidents have interrupted, until it is committed."""

    step: int
    # The generation after each incident.
    incident_generations: tuple[int, ...]
    # The Unix time of the commit before it.
    since: float
    # The duration of a usual step of the interrupted plan.
    usual_s: float
    # The predicted cost of the last incident.
    predicted_s: float | None


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
    # When the latest commit, start, resumption or decision happened.
    since: float | None = None
    # Durations of recent steps of this generation.
    recent_s: tuple[float, ...] = ()
    # Their median; before the first of them as predicted, or that of the plan before.
    usual_s: float | None = None
    # When the latest commit happened.
    committed_at: float | None = None
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
            is_salvaged: True if the interrupted step is completed.
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

    def evaluated(self, seconds: float) -> Self:
        """Note an evaluation of so many seconds, which are no part of a stall or of the cost of an incident."""

        def later(since: float | None) -> float | None:
            return None if since is None else since + seconds

        hit, pending = self.interrupted, self.pending
        return replace(
            self,
            since=later(self.since),
            committed_at=later(self.committed_at),
            interrupted=None if hit is None else replace(hit, since=hit.since + seconds),
            pending=None if pending is None else replace(pending, since=pending.since + seconds),
        )

    def migrating(self, plan: GenerationSpec, now: float) -> Self:
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
