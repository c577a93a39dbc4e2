"""Workers are lost, all others quiesce, and a decision is asked for; `regrouping` carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from chameleon_ft.coordinator import commands
from chameleon_ft.coordinator.decisions.cluster_state import workers_to_give_up
from chameleon_ft.coordinator.detectors import base as signals
from chameleon_ft.coordinator.handlers import bad_steps, gathering, slowness, switches
from chameleon_ft.coordinator.handlers.draft import Draft, count_death, record_incident
from chameleon_ft.coordinator.state.checkpoints import describe_unreadable
from chameleon_ft.coordinator.state.incidents import GIVEN_UP, Incident, Loss
from chameleon_ft.coordinator.state.members import Worker
from chameleon_ft.coordinator.state.state import Ending, Phase, State
from chameleon_ft.coordinator.state.switches import Switches
from chameleon_ft.events import kinds
from chameleon_ft.events.records import NoticedBy, RunStatus
from chameleon_ft.plan.frozen_map import updated, without
from chameleon_ft.protocol import messages
from chameleon_ft.quantities import duration, in_ranges
from chameleon_ft.recovery.generation import GenerationSpec

_ALL_TRAINED: Final = "; all steps are trained, and --resume repeats those after the newest checkpoint, if any"


# --- losses ----------------------------------------------------------------------------------------------------------


def detect(draft: Draft, signal: signals.Signal) -> None:
    """Give a signal to all detectors, and act on their findings."""
    detectors, findings = draft.state.detectors.observe(signal)
    draft.state = replace(draft.state, detectors=detectors)
    for finding in findings:
        match finding:
            case signals.Lost(worker=worker, noticed_by=noticed_by, cause=cause):
                lose(draft, worker, noticed_by, cause)
            case signals.Fatal(reason=reason, explained=worker, is_saved=is_saved):
                draft.state = replace(draft.state, incident=draft.state.incident.without(worker))
                if is_saved and draft.state.committed > 0 and not draft.state.nothing_trained:
                    end_with_checkpoint(draft, reason)
                else:
                    end(draft, "failed", reason)
            case signals.Reading():
                _reading(draft, finding)
            case signals.Slow():
                slowness.slow(draft, finding)
            case signals.Recovered():
                slowness.recovered(draft, finding)
            case signals.SlowLink():
                slowness.slow_link(draft, finding)
            case signals.RecoveredLink():
                slowness.recovered_link(draft, finding)
            case signals.SendProbe(probe=probe):
                draft.tell_live(messages.Probe(probe=probe))
                draft.tell_agents(messages.Probe(probe=probe))
            case signals.AskAgent(worker=worker):
                if (agent := draft.state.members[worker].agent) is not None:
                    draft.do(commands.Send(agent, messages.Probe(probe=0, worker=worker)))
            case signals.MessagesOverdue(reports=reports):
                for report in reports:
                    detect(draft, report)
                stop(draft)
            case signals.LinksCut(reports=reports):
                cut_links(draft, reports)
            case signals.Note(event=event):
                draft.record(event)


def _reading(draft: Draft, finding: signals.Reading) -> None:
    """Record that a worker has been reading a sample for long."""
    host = draft.state.hosts().get(finding.worker, "")
    read_s, limit_s = duration(finding.since_s), duration(finding.limit_s)
    message = (
        f"worker {finding.worker}{f' on {host}' if host else ''} has been {finding.doing} for {read_s}; it may take "
        f"{limit_s} (timeouts.sample_read_s)"
    )
    draft.record(
        kinds.Waiting(
            worker=finding.worker,
            host=host,
            doing=finding.doing,
            since_s=finding.since_s,
            limit_s=finding.limit_s,
            message=message,
        )
    )


def lose(draft: Draft, number: int, noticed_by: NoticedBy, cause: str) -> None:
    """Fence a worker, and continue without it."""
    worker = draft.state.members[number]
    if worker.lost or draft.state.phase is Phase.OVER:
        return
    fence(draft, number)
    _kill(draft, worker, is_hung=noticed_by in GIVEN_UP)
    state = draft.state
    steps = 0 if worker.first_step is None else state.committed - worker.first_step
    count_death(draft, number, steps=steps, at_link=noticed_by == "peer")
    if state.phase is Phase.GATHERING:
        if (reason := gathering.lost(draft, number, worker.crash or cause)) is not None:
            end(draft, "failed", reason)
        return
    if not worker.takes_part:
        cause = worker.crash or cause
        message = f"worker {number} was lost before it took part: {cause}"
        draft.record(kinds.JoinFailed(worker=number, incarnation=worker.incarnation, cause=cause, message=message))
        return
    upcoming = state.switches.next
    if worker.draining and not (number in state.needed or (upcoming and number in upcoming.spec.participants)):
        # `Exit` was about to be sent to it.
        record_drained(draft, number)
        if state.phase is not Phase.TRAINING:
            _continue_without(draft, number)
        return
    if state.phase is Phase.TRAINING and number in state.finished and upcoming is None:
        message = f"worker {number} has left after it had finished: {cause}"
        draft.record(kinds.Left(worker=number, step=state.committed, cause=cause, message=message))
        return
    _record_loss(draft, worker, noticed_by, cause)
    _continue_without(draft, number)


def cut_links(draft: Draft, reports: Sequence[signals.MessageFailed]) -> None:
    """Continue without one end of each pair of workers between which nothing passes: those whose loss costs least."""
    state = draft.state
    failed = tuple(kinds.FailedMessage(each.reporter, each.peer, each.error) for each in reports)
    draft.record(kinds.MessagesFailed(generation=state.active_generation, reports=failed))
    pairs = [(each.reporter, each.peer) for each in reports if each.peer is not None]
    assert state.placed is not None
    for worker in sorted(workers_to_give_up(pairs, state.placed, state.detectors.slowness.speeds)):
        peers = in_ranges({each for pair in pairs if worker in pair for each in pair} - {worker})
        lose(draft, worker, "peer", f"no data passes to or from workers {peers}, though the coordinator reaches all")


def newcomers_unreached(draft: Draft, reporter: int, position: messages.Position) -> None:
    """Give up a newcomer that cannot connect with a worker that trains; it is back when its turn to respawn comes."""
    upcoming, active = draft.state.switches.next, draft.state.active
    if upcoming is None or active is None or not upcoming.unprepared:
        return
    timeout_s = draft.state.settings.timeouts.message_timeout_s(0.0)
    for generation, peer, since_s in position.unreached:
        newcomers = {reporter, peer}.difference(active.plan.workers)
        if generation == upcoming.number and since_s >= timeout_s and newcomers:
            newcomer = max(newcomers)
            other = peer if newcomer == reporter else reporter
            lose(draft, newcomer, "peer", f"it cannot connect with worker {other}, though the coordinator reaches both")
            return


def _kill(draft: Draft, worker: Worker, *, is_hung: bool) -> None:
    """Have the process of a worker ended, which is fenced; the recovery does not wait for evidence of a hang."""
    kill = messages.Kill(worker=worker.id, is_hung=is_hung)
    if worker.agent is not None:
        draft.do(commands.Send(worker.agent, kill))
    if worker.connection is None:
        return
    if worker.agent is None and is_hung:
        draft.change_worker(worker, kill_connection=worker.connection)
        # The connection ends with the process.
        draft.do(commands.Send(worker.connection, kill))
    else:
        draft.do(commands.Drop(worker.connection))


def _record_loss(draft: Draft, worker: Worker, noticed_by: NoticedBy, cause: str) -> None:
    """Add the loss of a worker, which is fenced, to the incident and to the history of failures."""
    state, hosts = draft.state, draft.state.hosts()
    fault, host = state.fault_of(worker), hosts.get(worker.id, "")
    # The clock of another host is ahead.
    if fault is not None and fault.time > draft.at.unix_s:
        fault = None
    loss = Loss(
        worker=worker.id,
        step=state.committed,
        noticed_by=noticed_by,
        cause=cause,
        noticed_at=draft.at.unix_s,
        failed_at=None if fault is None else fault.time,
        incarnation=worker.incarnation,
        host=host,
    )
    live_hosts = [hosts.get(each, "") for each in state.members.live()]
    draft.state = replace(
        draft.state,
        incident=replace(state.incident, losses=(*state.incident.losses, loss)),
        history=state.history.failed(host, live_hosts, draft.at.monotonic_s),
    )
    draft.record(kinds.Lost(worker=worker.id, host=host, step=loss.step, noticed_by=noticed_by, cause=cause))


def fence(draft: Draft, number: int) -> None:
    """Count a worker as lost from now on, ignore its connection, and forget what it holds."""
    draft.state = replace(
        draft.state,
        members=draft.state.members.fence(number),
        scale_up=draft.state.scale_up.without(number),
        health=draft.state.health.without(number),
        snapshots=draft.state.snapshots.without(number),
    )
    detect(draft, signals.Fenced(number))


def record_drained(draft: Draft, number: int) -> None:
    """Record that a worker that was to leave has left. It is fenced."""
    live = len(draft.state.members.live())
    draft.state = replace(draft.state, history=draft.state.history.live(live, draft.at.monotonic_s))
    message = f"worker {number} has left, and its process ends"
    draft.record(kinds.Drained(worker=number, step=draft.state.committed, message=message))


def _continue_without(draft: Draft, worker: int) -> None:
    """Continue without a worker that is fenced and recorded."""
    state = draft.state
    if state.phase in (Phase.STOPPING, Phase.DECIDING):
        # A decision in progress is void: it includes a lost worker.
        draft.state = replace(draft.state, phase=Phase.STOPPING, quiesced=without(state.quiesced, worker))
        _await_reports(draft)
    elif worker in state.needed:
        stop(draft)
    elif state.phase is Phase.TRAINING:
        assert state.active is not None
        switches.participant_lost(draft, worker)
        action = "it was a spare: nothing changes"
        active = state.active.followed_by(first_step=state.committed, policy="none", action=action)
        record_incident(draft, active)


# --- the stop --------------------------------------------------------------------------------------------------------


def peer_failed(draft: Draft, worker: int, message: messages.PeerFailed) -> None:
    """Stop the generation, in which a message of a worker has failed."""
    peer = message.peer if message.peer in draft.state.participants else None
    is_left_over = message.generation == draft.state.switched_from and worker not in draft.state.participants
    if draft.state.phase is Phase.DECIDING or is_left_over:
        # All workers, or this one, have left their operations.
        return
    detect(draft, signals.MessageFailed(worker, peer, message.error))
    if draft.state.phase in (Phase.TRAINING, Phase.REGROUPING):
        stop(draft)


def checkpoint_unreadable(draft: Draft, worker: int, message: messages.CheckpointUnreadable) -> None:
    """Stop a generation whose checkpoint, or snapshot, a worker cannot read: all workers go back to an older state."""
    if draft.state.phase not in (Phase.TRAINING, Phase.REGROUPING):
        return
    step, why = message.step, f"worker {worker}: {message.error}"
    if message.is_snapshot:
        snapshots = replace(draft.state.snapshots, complete=None)
        draft.state = replace(
            draft.state, snapshots=snapshots, checkpoints=replace(draft.state.checkpoints, is_reread=True)
        )
        news = f"that of step {step} is damaged and is not used: {why}"
        draft.record(kinds.SnapshotUnreadable(step=step, error=why, message=news))
        stop(draft)
        return
    draft.state = replace(draft.state, checkpoints=draft.state.checkpoints.rejected(step, why))
    if message.is_damaged:
        draft.do(commands.MarkDamaged(step))
    draft.record(kinds.CheckpointUnreadable(step=step, error=why, message=describe_unreadable(step, why)))
    stop(draft)


def stop(draft: Draft) -> None:
    """End the generation, and one that is being prepared: all workers leave their operations and report their state."""
    incident = draft.state.incident
    if incident.is_switch:
        incident = Incident(losses=incident.losses)
    generation = draft.new_generation()
    draft.state = replace(
        draft.state,
        generation=generation,
        phase=Phase.STOPPING,
        incident=replace(incident, ended_at=incident.ended_at or draft.at.unix_s),
        quiesced={},
        finished=frozenset(),
        switches=draft.state.switches.stopped(),
        snapshots=draft.state.snapshots.given_up(),
    )
    draft.tell_live(messages.Stop(generation=generation))
    detect(draft, signals.StopRequested(draft.at.monotonic_s))
    _await_reports(draft)


def quiesced(draft: Draft, worker: int, message: messages.Quiesced) -> None:
    """Record the report of a worker that has left its operations."""
    if draft.state.phase is Phase.STOPPING:
        _take_plan(draft, worker, message)
        report = message.model_copy(update={"spec": ""}) if message.spec else message
        draft.state = replace(draft.state, quiesced=updated(draft.state.quiesced, {worker: report}))
        _decide_if_quiesced(draft)


def _take_plan(draft: Draft, worker: int, report: messages.Quiesced) -> None:
    """Follow the plan by which a worker trains, if the coordinator before could not write it into the journal."""
    state, upcoming = draft.state, draft.state.switches.next
    is_known = report.placed <= state.active_generation or (upcoming is not None and upcoming.number == report.placed)
    if is_known or not report.spec:
        return
    active = GenerationSpec.from_json(report.spec)
    if active.migration is not None:
        active = switches.without_migration(active)
    active = replace(active, generation=report.placed)
    draft.state = replace(state, active=active, in_force=active)
    message = f"the journal lacks the plan of generation {report.placed}, so it is restored from worker {worker}"
    draft.record(kinds.PlanRestored(generation=report.placed, worker=worker, message=message))


# --- the decision ----------------------------------------------------------------------------------------------------


def _await_reports(draft: Draft) -> None:
    """Ask for a decision if all survivors have quiesced; otherwise begin with what does not depend on their reports."""
    _decide_if_quiesced(draft)
    if draft.state.phase is Phase.STOPPING:
        draft.do(commands.Task.SPECULATE)


def _decide_if_quiesced(draft: Draft) -> None:
    """Ask for a decision once all survivors have quiesced."""
    state = draft.state
    live = state.members.live()
    if state.phase is not Phase.STOPPING or len(state.quiesced) < len(live) or not state.quiesced.keys() >= set(live):
        return
    assert state.active is not None
    if state.checkpoints.loads == state.active_generation and _have_not_loaded(state):
        draft.state = replace(draft.state, checkpoints=replace(state.checkpoints, is_reread=True))
        state = draft.state
    is_explained = state.checkpoints.is_reread or not state.participants.issubset(live)
    detect(draft, signals.AllQuiesced(state.active_generation, is_explained))
    if draft.state.phase is not Phase.STOPPING or draft.state.members.live() != live:
        # A culprit was fenced, and its loss is already handled.
        return
    if not live:
        is_done = state.committed >= state.settings.steps
        end(draft, "failed", f"no worker is left{_ALL_TRAINED if is_done else ''}")
        return
    if not _find_placement(draft, max(report.placed for report in state.quiesced.values())):
        end(draft, "failed", "the plan that workers follow is not in the journal of the run; resume it")
        return
    assert draft.state.in_force is not None
    reports = (state.quiesced[worker] for worker in draft.state.in_force.plan.workers if worker in state.quiesced)
    draft.enter_stage(max((state.committed, *(report.committed for report in reports))))
    draft.state = replace(
        draft.state,
        phase=Phase.DECIDING,
        incident=replace(draft.state.incident, stopped_at=draft.at.unix_s, switched=None, chosen_at=0.0),
        switches=Switches(),
        question=state.question + 1,
    )
    draft.do(commands.Task.DECIDE)


def _have_not_loaded(state: State) -> bool:
    """Return whether some workers still have the state before that of the active generation, which was discarded.

    Then the coordinator was lost before it had sent all orders.
    """
    assert state.active is not None
    reports = (state.quiesced[worker] for worker in state.active.plan.workers if worker in state.quiesced)
    return any(report.placed < state.active_generation for report in reports)


def _find_placement(draft: Draft, placed: int) -> bool:
    """Find the placement in force, from the newest generation whose placement a survivor holds.

    If one worker has given up its old layers, all hold the new ones; if none has, all still hold the old ones.
    Returns False if that generation is not known.
    """
    state, upcoming = draft.state, draft.state.switches.next
    if placed == state.active_generation:
        draft.state = replace(draft.state, in_force=state.placed)
    elif upcoming is not None and placed == upcoming.number:
        # They have switched, and no report of the step before has come.
        draft.state = replace(draft.state, in_force=state.placed, active=upcoming.spec)
        draft.state = replace(draft.state, in_force=draft.state.placed)
    return placed <= draft.state.active_generation


# --- the end ---------------------------------------------------------------------------------------------------------


def end_with_checkpoint(draft: Draft, reason: str) -> None:
    """End the run with a checkpoint of the state before the present step, which the job's own code cannot train."""
    health = replace(draft.state.health, ending=reason)
    draft.state = replace(draft.state, ending=Ending("failed", trains_no_step=True), health=health)
    if draft.state.phase in (Phase.TRAINING, Phase.REGROUPING):
        stop(draft)


def end(draft: Draft, status: RunStatus, reason: str) -> None:
    """End the run, and record losses that no generation has followed."""
    state = draft.state
    if state.phase is Phase.OVER:
        return
    bad_steps.record_all(draft)
    outcomes, outcome = state.outcomes.ended()
    draft.state = replace(draft.state, phase=Phase.OVER, outcomes=outcomes, ended=(status, reason))
    draft.record(outcome)
    draft.do(commands.Task.FORGET_DECISIONS)
    if state.incident.losses:
        # Training has not resumed.
        record_incident(draft, None, stop=reason)
    draft.tell_all(messages.Exit(reason=reason, status=status))
    draft.do(commands.Finish(status, reason))
