"""Progress of training: steps that workers have committed, and how long their operations took."""

from __future__ import annotations

import math
from dataclasses import replace

from chameleon_ft.coordinator import commands, events
from chameleon_ft.coordinator.detectors import base as signals
from chameleon_ft.coordinator.handlers import bad_steps, checkpoints, evaluations, incidents, snapshots, switches
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.members import Worker
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events import kinds
from chameleon_ft.events.records import StepRecord
from chameleon_ft.protocol import messages


def committed(draft: Draft, worker: Worker, message: messages.Committed) -> None:
    """Take in a worker's report of a step; the first report of each step advances the run."""
    state = draft.state
    if state.active is None:
        return
    # The rest of a step is no measure: it lacks operations.
    is_rest = state.active.rest is not None and message.step == state.active.first_step
    incidents.detect(draft, signals.OperationsTimed(message.times.longest_s, in_first_step=not worker.has_stepped))
    if not worker.has_stepped and message.generation == state.active_generation and not is_rest:
        draft.change_worker(worker, has_stepped=True)
    is_measured = message.generation == state.generation and message.step >= state.active.first_step
    if is_measured and not is_rest and not message.vote.skipped:
        draft.do(commands.MeasureOperations(worker.id, message.step, message.times))
    if message.step != state.committed:
        # Another worker has reported the step.
        return
    vote = message.vote
    # A slow read says nothing about the plan, or about how long a step without one takes.
    without_reads_s = max(message.step_s - vote.data_wait_s, 0.0) or message.step_s
    step_s = state.outcomes.completed_step_s(message.step_s, draft.at.unix_s) if is_rest else message.step_s
    # A step of the generation shows that all its workers have switched to it.
    switched_from = None if message.generation == state.generation else state.switched_from
    draft.state = replace(draft.state, committed=message.step + 1, last_vote=vote, switched_from=switched_from)
    if is_rest:
        incidents.detect(draft, signals.Progressed(draft.at.monotonic_s))
    else:
        incidents.detect(draft, signals.StepCommitted(draft.at.monotonic_s, without_reads_s))
    # Workers that train have switched to the newest plan.
    if state.phase is Phase.TRAINING and set(state.members.live()).issuperset(state.active.plan.workers):
        draft.do(commands.Task.PREPARE_DECISIONS)
    workers = len(state.active.plan.workers)
    draft.record(_step_record(message, draft.at, step_s=step_s, workers=workers, is_rest=is_rest))
    if vote.empty:
        text = f"no sample of step {message.step} has a loss term, so the step is skipped"
        draft.record(kinds.EmptyStep(step=message.step, message=text))
    elif vote.skipped:
        bad_steps.skipped(draft, message.step)
    # Layers that move make a step longer.
    if not is_rest and not vote.skipped and state.active.migration is None:
        draft.do(commands.MeasureStep(without_reads_s))
    outcomes, outcome = state.outcomes.committed(without_reads_s, draft.at.unix_s, is_rest=is_rest)
    outcomes, cost = outcomes.cost(message.step, draft.at.unix_s)
    draft.record(cost)
    draft.state = replace(draft.state, outcomes=outcomes)
    draft.record(outcome)
    evaluations.committed(draft, message)
    if vote.switch and not vote.finish and message.step + 1 < state.settings.steps:
        switches.adopt(draft, message)
    draft.enter_stage(draft.state.committed)
    if vote.checked and (placed := draft.state.placed) is not None:
        draft.state = replace(draft.state, health=draft.state.health.found_equal(message.step, placed.witnesses))
    checkpoints.committed(draft, message)
    snapshots.committed(draft, message)


def _step_record(
    message: messages.Committed, at: events.Moment, *, step_s: float, workers: int, is_rest: bool
) -> StepRecord:
    vote = message.vote
    return StepRecord(
        step=message.step,
        loss=math.nan if vote.skipped else vote.loss_sum / vote.terms,
        grad_norm=message.grad_norm,
        lr=message.lr,
        samples=0 if vote.skipped else vote.samples,
        tokens=0 if vote.skipped else int(vote.terms) if float(vote.terms).is_integer() else vote.terms,
        step_s=step_s,
        workers=workers,
        generation=message.generation,
        time=at.unix_s,
        is_rest=is_rest,
        is_skipped=vote.skipped,
        data_wait_s=min(vote.data_wait_s, step_s),
        auxiliary_loss=0.0 if vote.skipped else vote.auxiliary_sum / vote.terms,
        metrics={} if vote.skipped else dict(vote.logged),
    )


def operations_measured(draft: Draft, event: events.OperationsMeasured) -> None:
    """Have the detectors of slow workers and links judge the operations of a step of the present generation."""
    state = draft.state
    if event.generation != state.generation or not state.members[event.worker].is_live:
        return
    if not state.settings.health.detect_slow:
        return
    incidents.detect(
        draft, signals.OperationsMeasured(event.worker, event.generation, event.step, event.ratio, event.group)
    )
    judges = state.settings.judges_link
    judged = {
        (one, other): (ratio, kind) for one, other, ratio, kind in event.links if judges(is_between_hosts=bool(kind))
    }
    if judged:
        incidents.detect(draft, signals.LinksMeasured(event.generation, event.step, judged))
