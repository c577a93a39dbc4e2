"""Checkpoints: when ranks write one, and what they report about them."""

from __future__ import annotations

import math
from dataclasses import replace

from chameleon_ft.coordinator import commands
from chameleon_ft.coordinator.commands import Send
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.checkpoints import CheckpointSchedule
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events import kinds
from chameleon_ft.protocol import messages
from chameleon_ft.quantities import counted, duration
from chameleon_ft.recovery import POLICIES, Checkpoints, return_gap_s, risk_of


def committed(draft: Draft, message: messages.Committed) -> None:
    """Count a committed step, and request a checkpoint if one is due."""
    state, config = draft.state, draft.state.settings.checkpoint
    assert state.active is not None
    if message.step == state.active.first_step:
        # All have that state. The steps of newer checkpoints, which could not be read, are trained again.
        draft.do(commands.DistrustCheckpoints(after=message.step))
    if message.step + 1 in state.checkpoints.failed:
        draft.state = replace(draft.state, checkpoints=state.checkpoints.repeated(message.step + 1))
        state = draft.state
    if config.every == 0:
        _warn_once(draft, message)
    if message.vote.finish:
        return
    step = message.step + 1 if message.vote.checkpoint else None
    # Ranks begin those of the interval by themselves.
    if config.every != "auto":
        if step is not None:
            _reschedule(draft, state.checkpoints.schedule.begun())
        _request_wanted(draft)
        return
    schedule = state.checkpoints.schedule.committed(message.step_s, usual_s=state.usual_step_s, begun=step)
    if schedule.interval_s is None and schedule.cost_s is not None and state.phase is Phase.TRAINING:
        schedule = replace(schedule, interval_s=_interval_s(draft, schedule.cost_s, step_s=message.step_s))
    _reschedule(draft, schedule)
    if not schedule.is_due or state.phase is not Phase.TRAINING:
        return
    if schedule.writing is not None:
        since = duration(schedule.since_s)
        text = (
            f"that of step {schedule.writing} is not written after {since}, and the next one is due; look at the file "
            f"system of {state.settings.checkpoints}"
        )
        draft.record(kinds.CheckpointLate(step=schedule.writing, message=text))
    _reschedule(draft, schedule.requested())
    _request(draft)


def save(draft: Draft, connection: int, message: messages.SaveCheckpoint) -> None:
    """Have a checkpoint written as soon as possible, and answer the command that asked for it."""
    state = draft.state
    if state.phase is Phase.GATHERING:
        draft.do(Send(connection, messages.Refused(reason="the run has not begun; wait until it trains")))
        return
    # If the one of these steps has failed already, the next that is written has one more.
    committed = state.committed + (state.committed in state.checkpoints.failed)
    draft.do(Send(connection, message.model_copy(update={"committed": committed})))
    _reschedule(draft, replace(state.checkpoints.schedule, is_wanted=True))
    _request_wanted(draft)


def _request_wanted(draft: Draft) -> None:
    """Request the checkpoint that a user has asked for, if the ranks train and have no request."""
    schedule = draft.state.checkpoints.schedule
    if schedule.is_wanted and not schedule.is_requested and draft.state.phase is Phase.TRAINING:
        _reschedule(draft, schedule.requested())
        _request(draft)


def switched(draft: Draft) -> None:
    """Note that another plan is in force: some of its workers may not know the request, and its risk differs."""
    _reschedule(draft, replace(draft.state.checkpoints.schedule, interval_s=None))
    _request(draft)


def _request(draft: Draft) -> None:
    """Send the request to the workers that train, if they have not answered it."""
    state, schedule = draft.state, draft.state.checkpoints.schedule
    if schedule.is_requested and state.active is not None:
        for worker in state.active.plan.workers:
            draft.send(worker, messages.BeginCheckpoint(request=schedule.request))


def _reschedule(draft: Draft, schedule: CheckpointSchedule) -> None:
    draft.state = replace(draft.state, checkpoints=replace(draft.state.checkpoints, schedule=schedule))


def saved(draft: Draft, part: messages.CheckpointSaved) -> None:
    """Record that a checkpoint is complete, or that a rank could not write its layers: then none is kept."""
    state, events = draft.state, draft.state.checkpoints
    if part.generation < events.first_generation:
        return
    if part.error is not None or part.step in events.failed:
        # Its remains take room that the next one may need; other ranks may still add to them.
        draft.do(commands.DiscardCheckpoint(part.step, agreed=state.health.agreed))
    if part.error is not None:
        message = f"no complete one of step {part.step} in {state.settings.checkpoints}: {part.error}; what was "
        message += f"written of it is removed; {events.describe_newest()}, and a line follows once one is"
        # Said once, however many cannot be written.
        news = None if events.missed or part.error == messages.LEFT_OUT else message
        schedule = events.schedule.ended(part.step, copy_s=part.copy_s, is_complete=False)
        draft.state = replace(
            draft.state, checkpoints=replace(events.not_written(part.step, part.error), schedule=schedule)
        )
        draft.record(kinds.CheckpointFailed(step=part.step, error=part.error, message=news))
        if part.error != messages.LEFT_OUT:
            _tell_left_out(draft, part.step)
    if part.step in draft.state.checkpoints.failed:
        return
    has_slices = state.active is not None and state.active.sharding is not None
    events, complete = events.saved(part, num_layers=state.settings.num_layers, has_slices=has_slices)
    draft.state = replace(draft.state, checkpoints=events)
    if complete is not None:
        draft.do(
            commands.CompleteCheckpoint(
                part.step,
                agreed=state.health.agreed,
                slices=complete.slices,
                seals=complete.seals,
                evaluation=state.evaluations.of(part.step),
            )
        )
        missed = state.checkpoints.missed
        text = f"that of step {part.step} is complete, after {counted(missed, 'checkpoint')} that could not be written"
        draft.record(
            kinds.CheckpointComplete(
                step=part.step, copy_s=complete.copy_s, write_s=complete.write_s, message=text if missed else None
            )
        )
        _tell_left_out(draft, part.step)


def _tell_left_out(draft: Draft, written: int) -> None:
    """Record how many checkpoints were left out while that of step `written` was being written."""
    failed = draft.state.checkpoints.failed
    if steps := [step for step, why in sorted(failed.items()) if step > written and why == messages.LEFT_OUT]:
        message = f"{counted(len(steps), 'checkpoint')} after that of step {written} {messages.LEFT_OUT}"
        draft.record(kinds.CheckpointsLeftOut(step=written, steps=tuple(steps), message=message))


def not_marked(draft: Draft, step: int, error: str) -> None:
    """Record that a checkpoint is not complete after all, because it could not be marked."""
    events = draft.state.checkpoints
    draft.state = replace(draft.state, checkpoints=events.not_written(step, error))
    message = f"that of step {step} could not be marked as complete: {error}; the one before stays the newest"
    draft.record(kinds.CheckpointFailed(step=step, error=error, message=message))


def slow_io(draft: Draft, worker: int, message: messages.SlowIO) -> None:
    """Record that a rank has been reading or writing for long; no worker is given up for that."""
    events = draft.state.checkpoints
    if message in events.slow:
        return
    draft.state = replace(draft.state, checkpoints=replace(events, slow=events.slow | {message}))
    text = (
        f"worker {worker} has been {message.doing} for {duration(message.since_s)}, and there is no limit to that; "
        f"should it never end, look at the file system of {draft.state.settings.checkpoints}"
    )
    draft.record(kinds.Waiting(worker=worker, doing=message.doing, since_s=message.since_s, message=text))


def _interval_s(draft: Draft, cost_s: float, *, step_s: float) -> float:
    """Return the interval between two checkpoints that loses least time, in seconds of steps."""
    state = draft.state
    assert state.active is not None
    hosts = state.hosts()
    live = {worker: hosts[worker] for worker in state.members.live()}
    returns_always = POLICIES[state.settings.recovery.policy].restarts
    risk = None if returns_always else risk_of(state.active.plan.placement, live, state.active.owners)
    gap_s = return_gap_s(state.history.rate, risk, len(live))
    return Checkpoints(longest_s=math.inf, write_s=cost_s).interval_s(step_s=step_s, return_gap_s=gap_s)


def _warn_once(draft: Draft, message: messages.Committed) -> None:
    """Warn that a failure of the coordinator's machine loses all work, if there is more to do than a restart costs."""
    state = draft.state
    assert state.active is not None
    # The first step of a generation also allocates memory, so its duration is no measure.
    if state.checkpoints.schedule.is_warned or message.step == state.active.first_step:
        return
    _reschedule(draft, replace(state.checkpoints.schedule, is_warned=True))
    left_s = (state.settings.steps - message.step - 1) * message.step_s
    is_emulated = state.settings.workers_per_host is not None
    if left_s > state.settings.recovery.restart_cost_s and not is_emulated:
        text = (
            f"none is written in the {duration(left_s)} that are left (checkpoint.every = 0): all work is lost if the "
            "machine of the coordinator fails"
        )
        draft.record(kinds.NoCheckpoints(message=text))
