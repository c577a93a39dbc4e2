"""The events of a run that are no measurements of an incident or a decision. docs/files.md is made of their docstrings.

A field has a default if older runs lack it, or if it is not always known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chameleon_ft.events.base import Count, Event, Link, Number, Ratio, Time, Workers, event
from chameleon_ft.events.records import NoticedBy, RunStatus

# --- the run and its coordinator -------------------------------------------------------------------------------------


@event("finished")
class Finished(Event):
    """The end: `status`, `reason`."""

    status: RunStatus
    reason: str


@event("interrupt")
class Interrupt(Event):
    """The first Ctrl-C: `message`."""


@event("termination")
class Termination(Event):
    """The first SIGTERM that ends the run: `message`."""


@event("stalled")
class Stalled(Event):
    """The coordinator did not run for `stall_s` seconds; no worker is given up for that."""

    stall_s: Number


@event("reclaimed")
class Reclaimed(Event):
    """The term of the coordinator had run out; no worker is given up for that.

    It did not lead until it had claimed the next `term`, before any other could. `reason`: why the term had run out,
    empty if the coordinator did not run.
    """

    term: Count
    reason: str = ""


@event("took_over")
class TookOver(Event):
    """Another coordinator continues the run in `generation` and `step`."""

    generation: Count
    step: Count


@event("plan_restored")
class PlanRestored(Event):
    """The journal of the lost coordinator lacks the plan of `generation`; a `worker` that follows it gives it back."""

    generation: Count
    worker: Count


@event("background_replaced")
class BackgroundReplaced(Event):
    """Another process searches for plans during training, and repeats the work of the one before: the `reason`."""

    reason: str


@event("records_late")
class RecordsLate(Event):
    """Records cannot be written: `file`, and the `reason`; training continues."""

    file: str
    reason: str


@event("records_written")
class RecordsWritten(Event):
    """Records that were late for `late_s` seconds are written, but for `dropped` lines that did not fit in memory."""

    late_s: Number = 0.0
    dropped: Count


@event("records_lost")
class RecordsLost(Event):
    """Records could not be written before the end of the run; only displays show this event."""


@event("hint")
class Hint(Event):
    """Something seems wrong with the job, and does not prevent the run: `message`."""

    message: str


@event("job_changed")
class JobChanged(Event):
    """A run is resumed from `step` with another job than its checkpoint was written by: `changes`, each in words."""

    step: Count
    changes: tuple[str, ...]


@event("optimizer_undivided")
class OptimizerUndivided(Event):
    """Every holder of a layer keeps all of the optimizer's state.

    The class of the `optimizer` is not known to update each element by itself.
    """

    optimizer: str


@event("refused")
class Refused(Event):
    """A connection was rejected for a wrong join token or an unknown message: `address`, `reason`.

    `count` is the number of all so far. Beyond a hundred only some are written.
    """

    address: str
    reason: str
    count: Count = 0


# --- lost workers ----------------------------------------------------------------------------------------------------


@event("lost")
class Lost(Event):
    """A `worker` on `host` is given up in `step`, and the recovery begins.

    `noticed_by`, and the `cause` as far as it is known by then.
    """

    worker: Count
    host: str | None = None
    step: Count
    noticed_by: NoticedBy
    cause: str


@event("hang")
class Hang(Event):
    """A worker that was given up has been examined before it was killed.

    `worker`, `incarnation`, `host`, `process` (its state and processor time), the activity it was `doing` and `since`
    when, in Unix seconds, the `place` in its code ("FILE:LINE in FUNCTION"), and the `file` in `incidents/`. Null: not
    known. It has a `message` if it comes after the banner.
    """

    worker: Count
    incarnation: Count = 0
    host: str | None = None
    process: str | None = None
    doing: str | None = None
    since: Time | None = None
    place: str | None = None
    file: str


@dataclass(frozen=True, slots=True)
class FailedMessage:
    """The report of a worker about a message that failed; `peer` is the worker at its other end, if that is known."""

    reporter: Count
    peer: Count | None
    error: str

    def __str__(self) -> str:
        return f"of worker {self.reporter}{'' if self.peer is None else f' with worker {self.peer}'}: {self.error}"


@event("messages_failed")
class MessagesFailed(Event):
    """Messages failed although no worker is known to be lost: `generation`, and the `reports`.

    Each report has `reporter`, `peer` and `error`. The worker at an end of most of these messages is then lost
    (`peer`); if no report names a peer, the step is repeated.
    """

    generation: Count
    reports: tuple[FailedMessage, ...]


@event("left")
class Left(Event):
    """A `worker` has ended, or is out of reach, after it had finished: `step`, and the `cause`.

    The run ends once the others have finished.
    """

    worker: Count
    step: Count
    cause: str


@event("not_ended")
class NotEnded(Event):
    """Neither a lost `worker` on `host` nor an agent there answers, so its process may still run."""

    worker: Count
    host: str


@event("blocklisted")
class Blocklisted(Event):
    """A worker was lost too often and is not admitted again: `worker`, and its `deaths` in a row."""

    worker: Count
    deaths: Count


# --- hosts and workers that join or leave ----------------------------------------------------------------------------


@event("respawn")
class Respawn(Event):
    """The agent restarts a lost worker: `worker`, `incarnation`, counted from 1."""

    worker: Count
    incarnation: Count


@event("host_refused")
class HostRefused(Event):
    """A host is not admitted: `host`, the `reason`, and its agent's `report`; see [preflight](cluster.md#preflight)."""

    host: str
    reason: str
    report: Mapping[str, Any]


@event("host_joined")
class HostJoined(Event):
    """An agent has joined during the run: `host`, the `workers` that it starts, and those that it has `adopted`."""

    host: str | None = None
    workers: Workers
    adopted: Workers = ()


@event("joined")
class Joined(Event):
    """A worker is ready to take part, as a spare: `worker`, `incarnation`, `host`."""

    worker: Count
    incarnation: Count = 0
    host: str


@event("join_failed")
class JoinFailed(Event):
    """A worker was lost before it took part: `worker`, `incarnation`, `cause`."""

    worker: Count
    incarnation: Count = 0
    cause: str


@event("host_lost")
class HostLost(Event):
    """An agent is gone: `host`, and the `workers` that keep running without it."""

    host: str
    workers: Workers


@event("draining")
class Draining(Event):
    """These `workers` are to leave."""

    workers: Workers


@event("drained")
class Drained(Event):
    """A `worker` is in no plan any more after `step`, and its process ends."""

    worker: Count
    step: Count = 0


@event("host_drained")
class HostDrained(Event):
    """All workers of an agent are drained or lost, and it exits: `host`."""

    host: str


@event("drain_failed")
class DrainFailed(Event):
    """No plan was found without the `workers` that were to leave: `reason`; they stay."""

    workers: Workers
    reason: str


# --- slow workers and links ------------------------------------------------------------------------------------------


@event("slow")
class Slow(Event):
    """`worker` computes at `speed` of the speed of others since step `since_step`; `step` is the current one.

    `before_step_s` and `step_s` are median seconds of recent steps before and since, null if not known.
    """

    worker: Count
    speed: Ratio
    since_step: Count
    step: Count = 0
    before_step_s: Number | None
    step_s: Number | None


@event("slow_link")
class SlowLink(Event):
    """Micro-batches take 1 / `speed` times as long between two `workers`, a forward included, as on other links.

    The other fields are those of `slow`.
    """

    workers: Link
    speed: Ratio
    since_step: Count
    step: Count = 0
    before_step_s: Number | None
    step_s: Number | None


@event("recovered")
class Recovered(Event):
    """`worker` is as fast as the others again in `step`.

    If `is_trial`, it has been out of the plan for long instead, and another decision may include it.
    """

    worker: Count
    step: Count = 0
    is_trial: bool = False


@event("recovered_link")
class RecoveredLink(Event):
    """The link of `workers` is as fast as the others again; `is_trial` is as in `recovered`."""

    workers: Link
    step: Count = 0
    is_trial: bool = False


@event("waiting")
class Waiting(Event):
    """A `worker` has been `doing` something without a deadline for `since_s`, 10 s and every doubling of that.

    That is loading layers, or writing the last checkpoint. Workers with equal reports share one event. With `limit_s`:
    reading a sample, on a `host`; the worker counts as hung after so many seconds.
    """

    worker: Count
    host: str | None = None
    doing: str
    since_s: Number
    limit_s: Number | None = None


# --- bad steps and corruption ----------------------------------------------------------------------------------------


@event("state_differs")
class StateDiffers(Event):
    """After `step` updates holders of a layer have different states.

    `odd` are the workers that differ from a majority, with their layers, and `undecided` the layers without a majority,
    with their holders. `agreed` is after how many updates all holders last agreed; checkpoints after it are marked as
    damaged.
    """

    step: Count
    agreed: Count
    odd: Mapping[Count, Workers] = field(default_factory=dict)
    undecided: Mapping[Count, Workers]


@dataclass(frozen=True, slots=True)
class BadOrigin:
    """An operation with the first values that are not finite; `layers` are its first one and one after its last."""

    where: str
    micro_batch: Count
    worker: Count
    layers: tuple[Count, ...] = ()


@event("bad_step")
class BadStep(Event):
    """The loss or gradient of `step` was bad: `why`.

    If it `is_bad_again` when computed once more, the `action` is that of `health.on_bad_step`; otherwise it is
    `applied`. `origins` are the operations with the first values that are not finite, each with `worker`,
    `micro_batch`, `layers` (first, one after the last) and `where` (data, forward or backward). `changed`: the workers
    whose contribution differed.
    """

    step: Count
    why: str
    is_bad_again: bool
    action: Literal["skip", "rollback", "stop", "applied"]
    changed: Workers
    origins: tuple[BadOrigin, ...]


@event("sample_left_out")
class SampleLeftOut(Event):
    """A `worker` on `host` could not read a `sample`, because of `error`: it is [left out](data.md) of `step`.

    `epoch`: how many times all samples had been read before. If it `is_replaced`, the next one of the stream is in its
    place, and else the step has fewer samples.
    """

    step: Count
    epoch: Count
    sample: Count
    worker: Count
    host: str
    error: str
    is_replaced: bool = False


@event("devices_connected")
class DevicesConnected(Event):
    """The devices of a `worker` are connected in a `generation`, beside what else it did for so many `seconds`.

    `kept`: communicators that served the generation before; `formed`: new ones. `predicted_s`: the seconds by those of
    earlier generations, null without any.
    """

    generation: Count
    worker: Count
    kept: Count
    formed: Count
    seconds: Number
    predicted_s: Number | None = None


@event("loader_ended")
class LoaderEnded(Event):
    """A `loader` of a `worker` on `host`, a process that reads samples for it, has ended, and another takes its place.

    `doing`: the read that it was at, which is done again; empty if it was at none.
    """

    worker: Count
    host: str
    loader: str
    doing: str


@event("empty_step")
class EmptyStep(Event):
    """No sample of `step` has a loss term, so the step is skipped."""

    step: Count


# --- evaluations ---------------------------------------------------------------------------------------------------


@event("evaluating")
class Evaluating(Event):
    """All workers evaluate the state after `step`; an [event](evaluation.md) `evaluation` follows."""

    step: Count


# --- checkpoints and snapshots ---------------------------------------------------------------------------------------


@event("checkpoint")
class CheckpointComplete(Event):
    """A checkpoint is complete: `step`, with which training would resume.

    `copy_s`, for which the slowest worker stopped training to copy its layers; and `write_s`, in which the slowest
    worker wrote its copy to disk in the background.
    """

    step: Count
    copy_s: Number | None = None
    write_s: Number | None = None


@event("checkpoint_late")
class CheckpointLate(Event):
    """The next checkpoint is due, and the one of `step` is not written yet."""

    step: Count


@event("checkpoint_failed")
class CheckpointFailed(Event):
    """A checkpoint could not be written and is removed: `step`, `error`.

    Training continues; the first failure of a step also has a `message`. After the event `checkpoint` of the same step:
    all of it was written, but it could not be marked as complete.
    """

    step: Count
    error: str


@event("checkpoint_unreadable")
class CheckpointUnreadable(Event):
    """The checkpoint of `step` is damaged, or cannot be read; `error` names the file.

    All workers begin with an older one.
    """

    step: Count
    error: str


@event("checkpoint_incomplete")
class CheckpointIncomplete(Event):
    """A resumed run has found a newer checkpoint, of `step`, that is not complete."""

    step: Count


@event("checkpoints_left_out")
class CheckpointsLeftOut(Event):
    """The checkpoints of `steps` were left out while that of `step` was being written.

    Each also has an event `checkpoint_failed`, without a `message`.
    """

    step: Count
    steps: tuple[Count, ...]


@event("no_checkpoints")
class NoCheckpoints(Event):
    """A long run writes none (`checkpoint.every = 0`)."""


@event("snapshot")
class SnapshotComplete(Event):
    """A [snapshot](snapshots.md) is complete: `step`, to which training would go back.

    `held_up_s`, for which some worker's training waited for it; and `seconds` from the step after which it began until
    the last worker had its part.
    """

    step: Count
    held_up_s: Number = 0.0
    seconds: Number = 0.0


@event("snapshot_unreadable")
class SnapshotUnreadable(Event):
    """A part of the snapshot of `step` is damaged, as `error` says. All workers begin with another state."""

    step: Count
    error: str | None = None


@event("snapshots_off")
class SnapshotsOff(Event):
    """No snapshots are taken though their interval is `auto`, for a `reason`: they do not fit the memory of a host."""

    reason: str
