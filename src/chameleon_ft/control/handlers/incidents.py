"""From one generation to the next: a worker is lost, all others quiesce, a plan is chosen and launched."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.control import commands, events
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.detectors import base as signals
from chameleon_ft.control.handlers import bad_steps, gathering, slowness, switches
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.handlers.incident_records import count_death, record_incident
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.control.state.checkpoint_events import describe_unreadable
from chameleon_ft.control.state.incident import GIVEN_UP, Incident, Loss
from chameleon_ft.control.state.next_generation import Migrated
from chameleon_ft.control.state.state import Phase, State
from chameleon_ft.control.wire import messages
from chameleon_ft.observe import NoticedBy, RunStatus

__all__ = [
    "checkpoint_unreadable",
    "decided",
    "decision_failed",
    "detect",
    "end",
    "launched",
    "lose",
    "peer_failed",
    "quiesced",
    "started",
    "stop",
    "switched",
]


# --- losses ----------------------------------------------------------------------------------------------------------


def detect(draft: Draft, signal: signals.Signal) -> None:
    """Give a signal to all detectors, and act on their findings."""
    detectors, findings = draft.state.detectors.observe(signal)
    draft.set(detectors=detectors)
    for finding in findings:
        match finding:
            case signals.Lost(worker=worker, noticed_by=noticed_by, cause=cause):
                lose(draft, worker, noticed_by, cause)
            case signals.Fatal(reason=reason):
                end(draft, "failed", reason)
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
            case signals.Note(event=event, fields=fields):
                draft.record(event, **fields)


def lose(draft: Draft, number: int, noticed_by: NoticedBy, cause: str) -> None:
    """Fence a worker, and continue without it."""
    worker = draft.state.members[number]
    if worker.lost or draft.state.phase is Phase.OVER:
        return
    draft.set(
        members=draft.state.members.fence(number),
        scale_up=draft.state.scale_up.without(number),
        health=draft.state.health.without(number),
    )
    detect(draft, signals.Fenced(number))
    # The recovery does not wait for the evidence.
    kill = messages.Kill(worker=number, is_hung=noticed_by in GIVEN_UP)
    if worker.agent is not None:
        draft.do(commands.Send(worker.agent, kill))
    if worker.connection is not None:
        if worker.agent is None and kill.is_hung:
            draft.change_worker(worker, told_to_end=worker.connection)
            draft.do(commands.Send(worker.connection, kill))  # the connection ends with it
        else:
            draft.do(commands.Drop(worker.connection))
    state = draft.state
    count_death(draft, number, steps=0 if worker.first_step is None else state.committed - worker.first_step)
    if state.phase is Phase.GATHERING:
        if (reason := gathering.lost(draft, number, worker.crash or cause)) is not None:
            end(draft, "failed", reason)
        return
    if not worker.takes_part:
        cause = worker.crash or cause
        message = f"worker {number} was lost before it took part: {cause}"
        draft.record("join_failed", worker=number, incarnation=worker.incarnation, cause=cause, message=message)
        return
    fault = state.fault_of(worker)
    loss = Loss(
        worker=number,
        step=state.committed,
        noticed_by=noticed_by,
        cause=cause,
        noticed_at=draft.at.unix_s,
        failed_at=None if fault is None else fault.time,
        incarnation=worker.incarnation,
        host=state.hosts().get(number, ""),
    )
    hosts = state.hosts()
    left = [hosts.get(each, "") for each in state.members.live()]
    draft.set(
        incident=replace(state.incident, losses=(*state.incident.losses, loss)),
        history=state.history.failed(hosts.get(number, ""), left, draft.at.monotonic_s),
    )
    _continue_without(draft, number)


def _continue_without(draft: Draft, worker: int) -> None:
    """Continue without a worker that is fenced and recorded."""
    state = draft.state
    if state.phase in (Phase.STOPPING, Phase.DECIDING):
        # A decision in progress is void: it includes a lost worker.
        quiesced = {each: report for each, report in state.quiesced.items() if each != worker}
        draft.set(phase=Phase.STOPPING, quiesced=quiesced)
        _await_reports(draft)
    elif state.is_needed(worker):
        if worker not in state.finished or state.next is not None:  # the next generation needs it, too
            stop(draft)
    elif state.phase is Phase.TRAINING:
        assert state.active is not None
        switches.participant_lost(draft, worker)
        action = "it was a spare: nothing changes"
        active = ActivePlan(plan=state.active.plan, first_step=state.committed, policy="none", action=action)
        record_incident(draft, active)


# --- the stop --------------------------------------------------------------------------------------------------------


def peer_failed(draft: Draft, worker: int, message: messages.PeerFailed) -> None:
    """Stop the generation, in which a message of a worker has failed."""
    peer = message.peer if message.peer in draft.state.participants else None
    is_left_over = message.generation == draft.state.switched_from and worker not in draft.state.participants
    if draft.state.phase is Phase.DECIDING or is_left_over:
        return  # all workers, or this one, have left their operations
    detect(draft, signals.MessageFailed(worker, peer, message.error))
    if draft.state.phase in (Phase.TRAINING, Phase.REGROUPING):
        stop(draft)


def checkpoint_unreadable(draft: Draft, worker: int, message: messages.CheckpointUnreadable) -> None:
    """Stop a generation whose checkpoint a worker cannot read: all workers go back to an older one."""
    if draft.state.phase not in (Phase.TRAINING, Phase.REGROUPING):
        return
    step, why = message.step, f"worker {worker}: {message.error}"
    draft.set(checkpoints=draft.state.checkpoints.rejected(step, why))
    if message.is_damaged:
        draft.do(commands.MarkDamaged(step))
    draft.record("checkpoint_unreadable", step=step, error=why, message=describe_unreadable(step, why))
    stop(draft)


def stop(draft: Draft) -> None:
    """End the generation, and one that is being prepared: all workers leave their operations and report their state."""
    incident = draft.state.incident
    if incident.is_switch:
        incident = Incident(losses=incident.losses)
    draft.set(
        generation=draft.new_generation(),
        phase=Phase.STOPPING,
        incident=replace(incident, ended_at=incident.ended_at or draft.at.unix_s),
        quiesced={},
        finished=frozenset(),
        next=draft.state.switching_to,  # of any other, all is known: no worker has switched to it
        following=(),
        migrated=Migrated(),
    )
    draft.tell_live(messages.Stop(generation=draft.state.generation))
    detect(draft, signals.StopRequested(draft.at.monotonic_s))
    _await_reports(draft)


def quiesced(draft: Draft, worker: int, message: messages.Quiesced) -> None:
    """Record the report of a worker that has left its operations."""
    if draft.state.phase is Phase.STOPPING:
        draft.set(quiesced={**draft.state.quiesced, worker: message})
        _decide_if_quiesced(draft)


# --- the decision ----------------------------------------------------------------------------------------------------


def _await_reports(draft: Draft) -> None:
    """Ask for a decision if all survivors have quiesced; otherwise begin with what does not depend on their reports."""
    _decide_if_quiesced(draft)
    if draft.state.phase is Phase.STOPPING:
        draft.do(commands.Task.FORESEE_DECISION)


def _decide_if_quiesced(draft: Draft) -> None:
    """Ask for a decision once all survivors have quiesced."""
    state = draft.state
    live = state.members.live()
    if state.phase is not Phase.STOPPING or not state.quiesced.keys() >= set(live):
        return
    assert state.active is not None
    if state.checkpoints.loads == state.active_generation and _have_not_loaded(state):
        draft.set(checkpoints=replace(state.checkpoints, is_reread=True))
        state = draft.state
    is_explained = state.checkpoints.is_reread or not state.participants.issubset(live)
    detect(draft, signals.AllQuiesced(state.active_generation, is_explained))
    if draft.state.phase is not Phase.STOPPING or draft.state.members.live() != live:
        return  # a culprit was fenced, and its loss is already handled
    if not live:
        end(draft, "failed", "no worker is left")
        return
    if not _find_placement(draft, max(report.placed for report in state.quiesced.values())):
        end(draft, "failed", "the plan that workers follow is not in the journal of the run; resume it")
        return
    draft.set(
        phase=Phase.DECIDING,
        incident=replace(draft.state.incident, stopped_at=draft.at.unix_s, switched=None, chosen_at=0.0),
        next=None,
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
    state, upcoming = draft.state, draft.state.next
    if placed == state.active_generation:
        draft.set(in_force=state.placed)
    elif upcoming is not None and placed == upcoming.number:
        # They have switched, and no report of the step before has come.
        draft.set(in_force=state.placed, active=upcoming.plan, active_generation=upcoming.number)
        draft.set(in_force=draft.state.placed)
    return placed <= draft.state.active_generation


def decided(draft: Draft, event: events.Decided) -> None:
    """Launch the plan of a decision, then record why it was chosen."""
    state, plan = draft.state, event.plan
    if state.phase not in (Phase.GATHERING, Phase.DECIDING) or event.question != state.question:
        return  # a loss has overtaken it
    # If a plan is only tried again, a better one is still to be looked for.
    is_hasty = plan.is_hasty or (plan.policy == "again" and state.scale_up.hurried_at_s is not None)
    draft.set(incident=replace(state.incident, repeated_s=plan.repeated_s, is_hasty=is_hasty))
    if plan.decision is not None:
        draft.set(incident=replace(draft.state.incident, chosen_at=event.chosen_at, looked_up=plan.prepared))
    _launch(draft, plan)
    if plan.decision is None:
        return
    # All workers wait for their orders, and none for a record.
    fields, chosen = plan.to_json(), plan.decision.chosen
    draft.record(
        "decision",
        generation=state.generation,
        trigger="loss" if fields["lost"] else "join" if state.scale_up.newcomers else "review",
        search_s=draft.at.unix_s - state.incident.stopped_at,
        **fields,
    )
    outcomes, outcome = state.outcomes.decided(
        generation=state.generation,
        policy=plan.policy,
        predicted_step_s=None if chosen is None else chosen.step_s,
        predicted_stall_s=None if chosen is None else chosen.stall_s,
        repeated_steps=max(0, state.committed - plan.first_step),
        is_salvaged=plan.rest is not None,
        now=draft.at.unix_s,
    )
    draft.set(outcomes=outcomes)
    draft.record_outcome(outcome)


def decision_failed(draft: Draft, event: events.DecisionFailed) -> None:
    """End the run, which cannot continue."""
    if event.question == draft.state.question:
        end(draft, "failed", event.reason)


# --- the next generation ---------------------------------------------------------------------------------------------


def _launch(draft: Draft, plan: RecoveryPlan) -> None:
    """Give every participant of the plan its orders for the current generation."""
    bad_steps.record(draft)  # of the generation before, also if not all of its workers have reported
    if draft.state.ending is None:
        draft.set(health=replace(draft.state.health, ending=""))  # the bad step is trained again
    state, active = draft.state, plan.active()
    draft.begin_plan(
        active,
        loads=plan.load != "keep",
        phase=Phase.REGROUPING,
        active_generation=state.generation,
        switched_from=None,
        in_force=active if active.transition is None else state.in_force,
        committed=plan.first_step,
        finished=frozenset(),
        checkpoints=state.checkpoints if plan.load == "keep" else state.checkpoints.loaded(state.generation),
        schedule=state.schedule.interrupted() if plan.load == "keep" else state.schedule.returned(),
    )
    detect(draft, signals.Progressed(draft.at.monotonic_s))
    draft.do(commands.Launch(plan, is_first=state.active is None))


def launched(draft: Draft, event: events.Launched) -> None:
    """Do what no worker waits for, once the orders of a generation have been sent."""
    state = draft.state
    if event.generation != state.generation:
        return
    draft.set(
        incident=replace(state.incident, decided_at=draft.at.unix_s),
        history=state.history.live(len(state.members.live()), draft.at.monotonic_s),
    )
    draft.do(commands.Task.FORGET_DECISIONS)


def switched(draft: Draft, message: messages.Switched) -> None:
    """Record the transition at the first report that all workers hold their part of the new placement."""
    state, active = draft.state, draft.state.active
    if state.phase is not Phase.REGROUPING or state.incident.switched is not None:
        return
    assert active is not None
    assert active.transfer is not None
    draft.set(incident=replace(state.incident, switched=message))
    draft.do(commands.MeasureTransfer(message.transfer_s))
    draft.record(
        "transition",
        generation=state.generation,
        workers=len(active.participants),
        layers=sum(len(each.layers) for each in active.transfer.messages),
        messages=len(active.transfer.messages),
        rounds=len(active.transfer.rounds),
        planned_bytes=active.transfer.total_bytes,
        moved_bytes=message.moved_bytes,
        transfer_s=message.transfer_s,
    )


def started(draft: Draft) -> None:
    """Record that training has resumed, at the first operation of a worker."""
    detect(draft, signals.Progressed(draft.at.monotonic_s))
    state = draft.state
    if state.phase is not Phase.REGROUPING:
        return
    assert state.active is not None
    now, incident, newcomers = draft.at.unix_s, state.incident, sorted(state.scale_up.newcomers)
    hurried, scale_up = incident.is_hasty, state.scale_up
    is_final = not hurried and not state.following
    if hurried:
        scale_up = scale_up.hurried(draft.at.monotonic_s)
    elif is_final:
        scale_up = scale_up.settled()
    outcomes = state.outcomes
    if incident.losses:
        # If the step that was running could be applied, the next one is late.
        step = max(incident.losses[0].step, state.active.first_step)
        outcomes = outcomes.hit(step, generation=state.generation)
    draft.set(phase=Phase.TRAINING, outcomes=outcomes.resumed(now), scale_up=scale_up)
    record_incident(draft, state.active)
    if is_final and (newcomers or incident.is_switch):
        record = incident.join_record(
            state.active,
            newcomers,
            drained=sorted(state.members.draining().difference(state.active.plan.workers)),
            generation=state.generation,
            resumed_at=now,
        )
        draft.do(commands.Record(record))


# --- the end ---------------------------------------------------------------------------------------------------------


def end(draft: Draft, status: RunStatus, reason: str) -> None:
    """End the run, and record losses that no generation has followed."""
    state = draft.state
    if state.phase is Phase.OVER:
        return
    bad_steps.record(draft)
    outcomes, outcome = state.outcomes.ended()
    draft.set(phase=Phase.OVER, outcomes=outcomes, ended=(status, reason))
    draft.record_outcome(outcome)
    draft.do(commands.Task.FORGET_DECISIONS)
    if state.incident.losses:
        record_incident(draft, None if status == "failed" else state.active, stop=reason)
    draft.tell_all(messages.Exit(reason=reason, status=status))
    draft.do(commands.Finish(status, reason))
