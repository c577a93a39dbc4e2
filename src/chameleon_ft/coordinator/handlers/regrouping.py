"""A decision is carried out: its plan is launched, layers move, and training resumes."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.coordinator import commands, events
from chameleon_ft.coordinator.detectors import base as signals
from chameleon_ft.coordinator.handlers import bad_steps, evaluations, incidents
from chameleon_ft.coordinator.handlers.draft import Draft, record_incident
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events import decisions, kinds
from chameleon_ft.protocol import messages
from chameleon_ft.recovery.generation import GenerationSpec


def decided(draft: Draft, event: events.Decided) -> None:
    """Launch the generation of a decision, then record why it was chosen."""
    state, spec, choice = draft.state, event.spec, event.choice
    if state.phase not in (Phase.GATHERING, Phase.DECIDING) or event.question != state.question:
        # A loss has overtaken it.
        return
    # If a plan is only tried again, a better one is still to be looked for.
    is_tried_again = spec.policy == "again" and state.scale_up.provisional_since_s is not None
    incident = replace(
        state.incident,
        repeated_s=event.repeated_s,
        is_provisional=event.is_provisional or is_tried_again,
        decided_at=draft.at.unix_s,
    )
    if choice is not None:
        incident = replace(incident, chosen_at=choice.chosen_at, looked_up=choice.is_prepared)
    draft.state = replace(draft.state, incident=incident)
    _launch(draft, evaluations.begin_with(draft, replace(spec, generation=state.generation)))
    if choice is None:
        return
    # All workers wait for their orders, and none for a record.
    fields = choice.record
    trigger = "loss" if fields["lost"] else "join" if state.scale_up.newcomers else "review"
    took = {"generation": state.generation, "search_s": draft.at.unix_s - state.incident.stopped_at}
    draft.record(decisions.DecisionEvent.of({"trigger": trigger, **took, **fields}))
    outcomes, outcome = state.outcomes.decided(
        generation=state.generation,
        policy=spec.policy,
        predicted_step_s=choice.step_s,
        predicted_stall_s=choice.stall_s,
        repeated_steps=max(0, state.committed - spec.first_step),
        is_salvaged=spec.rest is not None,
        now=draft.at.unix_s,
    )
    draft.state = replace(draft.state, outcomes=outcomes)
    draft.record(outcome)


def decision_failed(draft: Draft, event: events.DecisionFailed) -> None:
    """End the run, which cannot continue."""
    if event.question == draft.state.question:
        incidents.end(draft, "failed", event.reason)


def _launch(draft: Draft, spec: GenerationSpec) -> None:
    """Give every participant its orders for the current generation."""
    # Bad steps of the generation before count also if not all of its workers have reported.
    bad_steps.record_all(draft)
    if draft.state.ending is None:
        # The bad step is trained again.
        draft.state = replace(draft.state, health=replace(draft.state.health, ending=""))
    state = draft.state
    keeps = spec.load == "keep"
    draft.begin_generation(spec, loads=spec.load not in ("keep", "snapshot"))
    draft.state = replace(
        draft.state,
        switched_from=None,
        in_force=spec if spec.transition is None else state.in_force,
        committed=spec.first_step,
        checkpoints=state.checkpoints.interrupted() if keeps else state.checkpoints.loaded(state.generation),
        snapshots=state.snapshots
        if keeps
        else state.snapshots.loaded(spec.first_step, is_fresh=spec.load == "initial"),
        history=state.history.live(len(state.members.live()), draft.at.monotonic_s),
    )
    if spec.load == "snapshot":  # each holder has its own copy, which is not compared with others
        draft.state = replace(
            draft.state, health=replace(draft.state.health, agreed=min(draft.state.health.agreed, spec.first_step))
        )
    incidents.detect(draft, signals.Progressed(draft.at.monotonic_s))
    draft.do(commands.Launch(spec, is_first=state.active is None), commands.Task.FORGET_DECISIONS)


def switched(draft: Draft, message: messages.Switched) -> None:
    """Record the transition at the first report that all workers hold their part of the new placement."""
    state, active = draft.state, draft.state.active
    if state.phase is not Phase.REGROUPING or state.incident.switched is not None:
        return
    assert active is not None
    assert active.transfer is not None
    draft.state = replace(draft.state, incident=replace(state.incident, switched=message))
    draft.do(commands.MeasureTransfer(message.transfer_s))
    draft.record(
        decisions.Transition(
            generation=state.generation,
            workers=len(active.participants),
            layers=sum(len(each.layers) for each in active.transfer.messages),
            messages=len(active.transfer.messages),
            rounds=len(active.transfer.rounds),
            planned_bytes=active.transfer.total_bytes,
            moved_bytes=message.moved_bytes,
            transfer_s=message.transfer_s,
        )
    )


def devices_connected(draft: Draft, worker: int, message: messages.DevicesConnected) -> None:
    """Record how long it took to connect the devices of a worker, beside the prediction."""
    generation, kept, formed, seconds = message.generation, message.kept, message.formed, message.seconds
    history, predicted_s = draft.state.history.connected(generation, formed, seconds)
    draft.state = replace(draft.state, history=history)
    draft.record(
        kinds.DevicesConnected(
            generation=generation, worker=worker, kept=kept, formed=formed, seconds=seconds, predicted_s=predicted_s
        )
    )


def started(draft: Draft) -> None:
    """Record that training has resumed, at the first operation of a worker."""
    incidents.detect(draft, signals.Progressed(draft.at.monotonic_s))
    state = draft.state
    if state.phase is not Phase.REGROUPING:
        return
    assert state.active is not None
    now, incident, newcomers = draft.at.unix_s, state.incident, sorted(state.scale_up.newcomers)
    scale_up = state.scale_up
    is_final = not incident.is_provisional and not state.switches.following
    if incident.is_provisional:
        scale_up = scale_up.with_provisional_plan(draft.at.monotonic_s)
    elif is_final:
        scale_up = scale_up.settled()
    outcomes = state.outcomes
    if incident.losses:
        # If the step that was running could be applied, the next one is late.
        step = max(incident.losses[0].step, state.active.first_step)
        outcomes = outcomes.hit(step, generation=state.generation)
    draft.state = replace(draft.state, phase=Phase.TRAINING, outcomes=outcomes.resumed(now), scale_up=scale_up)
    record_incident(draft, state.active)
    if is_final and (newcomers or incident.is_switch):
        record = incident.join_record(
            state.active,
            newcomers,
            drained=sorted(state.members.draining().difference(state.active.plan.workers)),
            generation=state.generation,
            resumed_at=now,
        )
        draft.record(record)
