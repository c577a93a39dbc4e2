"""Snapshots in the memory of workers: when they take one, and what they report about it."""

from __future__ import annotations

import math
from dataclasses import replace

from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.cost.snapshots import MIN_SNAPSHOT_COST
from chameleon_ft.events import kinds
from chameleon_ft.protocol import messages
from chameleon_ft.recovery import LONGEST_BETWEEN_SNAPSHOTS_S, POLICIES, Checkpoints, risk_of


def committed(draft: Draft, message: messages.Committed) -> None:
    """Count a committed step: workers may have begun a snapshot after it, or may have to."""
    state = draft.state
    if state.active is None:
        return
    if (layout := state.active.snapshots) is None:
        if state.snapshots.is_fresh and state.settings.snapshots.every:
            # Otherwise a late loss would return to the beginning.
            draft.state = replace(draft.state, snapshots=replace(state.snapshots, is_fresh=False))
        return
    begins = message.vote.takes_snapshot and message.generation == state.generation and state.phase is Phase.TRAINING
    if begins:
        workers = state.active.plan.workers
        begun = state.snapshots.begun(message.step + 1, layout, workers, now_s=draft.at.monotonic_s)
        draft.state = replace(draft.state, snapshots=begun)
    if state.settings.snapshots.every != "auto" or message.vote.finish:
        return
    snapshots = draft.state.snapshots
    schedule = snapshots.schedule.committed(
        message.step_s, usual_s=state.usual_step_s, begun=message.step + 1 if begins else None
    )
    if schedule.interval_s is None and schedule.cost_s is not None and state.phase is Phase.TRAINING:
        schedule = replace(schedule, interval_s=_interval_s(draft, schedule.cost_s, step_s=message.step_s))
    draft.state = replace(draft.state, snapshots=replace(snapshots, schedule=schedule))
    if schedule.is_due and schedule.writing is None and state.phase is Phase.TRAINING:
        draft.state = replace(draft.state, snapshots=replace(snapshots, schedule=schedule.requested()))
        for each in state.active.plan.workers:
            draft.send(each, messages.BeginSnapshot(request=draft.state.snapshots.schedule.request))


def taken(draft: Draft, worker: int, message: messages.SnapshotTaken) -> None:
    """Count the part of a worker; once all have theirs, the snapshot before is not needed any more."""
    before = draft.state.snapshots
    if before.taking is None or message.step != before.taking.step or message.generation != draft.state.generation:
        return
    snapshots = before.confirmed(worker, message.held_up_s)
    if snapshots.taking is not None:
        draft.state = replace(draft.state, snapshots=snapshots)
        return
    seconds = draft.at.monotonic_s - snapshots.begun_at_s
    cost_s = max(snapshots.held_up_s, MIN_SNAPSHOT_COST * seconds)
    schedule = snapshots.schedule.ended(message.step, copy_s=cost_s, is_complete=True)
    draft.state = replace(draft.state, snapshots=replace(snapshots, schedule=schedule))
    draft.tell_live(messages.SnapshotResolved(step=message.step, is_complete=True))
    draft.record(kinds.SnapshotComplete(step=message.step, held_up_s=snapshots.held_up_s, seconds=seconds))


def switched(draft: Draft) -> None:
    """Give up the snapshot that was being taken when the run has switched to another plan."""
    snapshots = draft.state.snapshots
    given_up = snapshots.given_up()
    draft.state = replace(
        draft.state, snapshots=replace(given_up, schedule=replace(given_up.schedule, interval_s=None))
    )
    if snapshots.taking is not None:
        draft.tell_live(messages.SnapshotResolved(step=snapshots.taking.step, is_complete=False))


def repeat_orders(draft: Draft, worker: int) -> None:
    """Repeat the messages that a worker may lack which was without a coordinator."""
    snapshots = draft.state.snapshots
    if snapshots.complete is not None:
        draft.send(worker, messages.SnapshotResolved(step=snapshots.complete.step, is_complete=True))
    if snapshots.schedule.is_requested:
        draft.send(worker, messages.BeginSnapshot(request=snapshots.schedule.request))


def _interval_s(draft: Draft, cost_s: float, *, step_s: float) -> float:
    """Return the interval between two snapshots that loses least time, in seconds of steps.

    A snapshot serves after an incident that takes all holders of some layer or all owners of a slice; under the policy
    `restart`, after every incident.
    """
    state = draft.state
    assert state.active is not None
    hosts, rate = state.hosts(), state.history.rate
    live = {worker: hosts[worker] for worker in state.members.live()}
    risk = risk_of(state.active.plan.placement, live, state.active.owners)
    returns_always = POLICIES[state.settings.recovery.policy].restarts
    fatal = 1.0 if returns_always else rate.fatal_probability(risk)
    gap_s = rate.horizon_s(len(live)) / fatal if fatal else math.inf
    taken = Checkpoints(longest_s=LONGEST_BETWEEN_SNAPSHOTS_S, write_s=cost_s)
    return taken.interval_s(step_s=step_s, return_gap_s=gap_s)
