"""Switches to the next generation without a stop: it is prepared while training continues, and begins at the end of a
step.

If layers move, they do so while a generation with the routes of the present plan trains: the present one, or one that
newcomers have been taken into by a switch. When they have arrived, all switch to the plan that the layers are for. If
memory does not hold all of them, they move in waves: then all switch to another plan in between, and drop layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from chameleon_ft.coordinator import commands
from chameleon_ft.coordinator.handlers import checkpoints, snapshots
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.incidents import Incident
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.coordinator.state.switches import Migrated, NextGeneration, Switches
from chameleon_ft.events import decisions
from chameleon_ft.protocol import messages
from chameleon_ft.quantities import duration, in_ranges
from chameleon_ft.recovery.generation import GenerationSpec

# The policy of a plan without the layers that moved.
_CANCELLED: Final = "cancelled-migration"
# Workers that do not reach each other are asked at this interval.
_PROBE_S: Final = 5.0
# A migration may take this many times as long as predicted,
_MIGRATION_FACTOR: Final = 20.0
# and this many times timeouts.rendezvous_s in any case.
_MIGRATION_RENDEZVOUS: Final = 5.0


def prepare(draft: Draft, plans: Sequence[GenerationSpec], record: Mapping[str, object]) -> None:
    """Have the first of these plans prepared, or its layers move; the others follow one after the other.

    The decision that they come from is recorded once the last of them is in force.
    """
    _update(draft, replace(draft.state.switches, following=tuple(plans), record=record))
    _proceed(draft)


def record_decision(draft: Draft, record: Mapping[str, object]) -> None:
    """Record a decision made during training: its plan is in force now, or it was to continue as before."""
    draft.record(decisions.DecisionEvent.of({"generation": draft.state.generation, **record}))


def _proceed(draft: Draft) -> None:
    state = draft.state
    plan, *following = (each.at(state.committed) for each in state.switches.following)
    assert state.active is not None
    if plan.migration is None or not _only_moves_layers(plan, state.active):
        _prepare(draft)
        return
    active = replace(
        state.active,
        plan=plan.plan,
        migration=plan.migration,
        hold_s=plan.hold_s,
        migration_s=plan.migration_s,
        predicted_step_s=plan.predicted_step_s,
        next_sharding=plan.next_sharding,
    )
    draft.state = replace(draft.state, in_force=state.placed, active=active)
    _update(draft, replace(draft.state.switches, following=tuple(following)))
    draft.do(commands.Migrate(active, active.plan.workers))
    draft.state = replace(draft.state, outcomes=state.outcomes.migrating(plan, draft.at.unix_s))
    _end_outcome(draft)
    _migrating(draft)
    resume(draft)


def _only_moves_layers(plan: GenerationSpec, active: GenerationSpec) -> bool:
    """Return whether a plan differs from the active one in its placement alone, so that no generation is needed."""
    return (
        active.plan.placement.ranges.keys() >= set(plan.participants)
        and active.plan == replace(plan.plan, placement=active.plan.placement)
        and active.in_flight_limits == plan.in_flight_limits
    )


def _migrating(draft: Draft) -> None:
    """Note that layers move while the active generation trains."""
    active = draft.state.active
    assert active is not None
    assert active.migration is not None
    _update(draft, replace(draft.state.switches, migrating_at=draft.at.unix_s))
    arriving: dict[int, list[int]] = {}
    for message in active.migration.messages:
        arriving.setdefault(message.destination, []).extend(message.layers)
    draft.record(
        decisions.Migration(
            generation=draft.state.generation,
            step=draft.state.committed,
            layers=sum(len(message.layers) for message in active.migration.messages),
            bytes=active.migration.total_bytes,
            slices=len(active.migrating_slices),
            arriving={worker: in_ranges(layers) for worker, layers in arriving.items()},
        )
    )


def resume(draft: Draft) -> bool:
    """Have the plan prepared that follows the one in force, as soon as that can be; return whether there is one."""
    state = draft.state
    if not state.switches.following:
        return False
    assert state.active is not None
    if state.active.migration is not None:
        _prepare(draft)
    elif state.committed > state.active.first_step:
        # By then all workers have dropped layers for the next wave.
        if all(set(plan.participants).issubset(state.members.live()) for plan in state.switches.following):
            _proceed(draft)
        else:
            _cancel(draft)
    return bool(draft.state.switches.following)


def _prepare(draft: Draft) -> None:
    following, committed = draft.state.switches.following[0], draft.state.committed
    spec = replace(following.at(committed), generation=draft.new_generation(), first_step=committed + 1)
    upcoming = NextGeneration(
        spec=spec,
        unprepared=frozenset(spec.participants),
        deadline_s=draft.at.monotonic_s + _patience_s(draft.state),
        probe_at_s=draft.at.monotonic_s + draft.state.settings.timeouts.message_timeout_s(0.0),
    )
    _update(draft, replace(draft.state.switches, next=upcoming))
    if spec.migration is not None and draft.state.active is not None:
        # Those that train have no memory for more layers before they train that generation.
        training = draft.state.active.plan.placement.ranges
        newcomers = tuple(worker for worker in spec.participants if worker not in training)
        draft.do(commands.Migrate(spec, newcomers))
    draft.do(commands.Task.PREPARE_GENERATION)


def _patience_s(state: State) -> float:
    """Return how long to wait for the workers that prepare the plan that follows.

    If layers move before it, they answer once all have arrived. That may take far longer than predicted, and costs
    nothing, because training continues; a worker that is lost meanwhile, or hangs, is noticed as in any step. So the
    limit is only for layers that never arrive, and grows with each attempt.
    """
    rendezvous_s = state.settings.timeouts.rendezvous_s
    if (active := _awaits_layers(state)) is None:
        return rendezvous_s
    limit_s = max(_MIGRATION_RENDEZVOUS * rendezvous_s, _MIGRATION_FACTOR * active.migration_s)
    return limit_s * float(2 ** min(state.scale_up.retries, 10))


def _awaits_layers(state: State) -> GenerationSpec | None:
    """Return the active plan if its layers have to arrive before the plan that follows is prepared."""
    active = state.active
    return active if active and active.migration and state.switches.following[0].policy != _CANCELLED else None


def prepared(draft: Draft, worker: int, message: messages.Prepared) -> None:
    """Note that a worker has prepared the next generation; once all have, have the workers that train switch to it."""
    upcoming = draft.state.switches.next
    if upcoming is None or message.generation != upcoming.number or upcoming.is_switching:
        return
    if message.error is not None:
        _give_up(draft, f"worker {worker}: {message.error}", cancels=message.cannot_migrate)
        return
    _update(
        draft,
        replace(
            draft.state.switches,
            next=replace(upcoming, unprepared=upcoming.unprepared - {worker}, prepared_at=draft.at.unix_s),
        ),
    )
    _switch_if_prepared(draft)


def advance(draft: Draft) -> None:
    """Switch if all workers are prepared, or give the next generation up if that takes too long."""
    upcoming = draft.state.switches.next
    assert upcoming is not None
    if upcoming.is_switching:
        return
    _switch_if_prepared(draft)
    if upcoming.unprepared and draft.at.monotonic_s >= upcoming.probe_at_s:
        _update(
            draft, replace(draft.state.switches, next=replace(upcoming, probe_at_s=draft.at.monotonic_s + _PROBE_S))
        )
        draft.tell_live(messages.Probe(probe=0))
    if upcoming.unprepared and draft.at.monotonic_s >= upcoming.deadline_s:
        missing = ", ".join(map(str, sorted(upcoming.unprepared)))
        limit = "timeouts.rendezvous_s" if _awaits_layers(draft.state) is None else "the limit for layers that move"
        _give_up(draft, f"no answer from {missing} within {duration(_patience_s(draft.state))}, {limit}", cancels=True)


def participant_lost(draft: Draft, worker: int) -> None:
    """Give up the next generation if it needs this worker; the generation that trains does not."""
    upcoming = draft.state.switches.next
    if upcoming is not None and worker in upcoming.spec.participants:
        discard(draft)


def discard(draft: Draft) -> None:
    """Give up the next generation, for which no `Switch` was sent, and those to follow it.

    While layers move, the run needs them: they are prepared again.
    """
    upcoming, active = draft.state.switches.next, draft.state.active
    assert active is not None
    if upcoming is not None:
        assert not upcoming.is_switching
        _update(draft, replace(draft.state.switches, next=None))
        for worker in upcoming.spec.participants:
            draft.send(worker, messages.Discard(generation=upcoming.number))
    if active.migration is None:
        _cancel(draft)


def abandon(draft: Draft) -> None:
    """Give up the next generation and layers that move, whose orders may be lost; another decision follows."""
    active = draft.state.active
    assert active is not None
    if draft.state.switches.next is None and not draft.state.switches.following:
        return
    discard(draft)
    if active.migration is not None:
        _update(draft, replace(draft.state.switches, following=(without_migration(active),)))
    draft.state = replace(draft.state, scale_up=draft.state.scale_up.with_provisional_plan(draft.at.monotonic_s))


def _cancel(draft: Draft) -> None:
    """Give up the plans that follow; between two waves, another plan is searched for."""
    if draft.state.switches.migrated.waves:
        draft.state = replace(draft.state, scale_up=draft.state.scale_up.with_provisional_plan(draft.at.monotonic_s))
    _update(draft, replace(draft.state.switches, following=(), migrated=Migrated()))


def _give_up(draft: Draft, error: str, *, cancels: bool = False) -> None:
    """Discard the next generation because of an error, and try again after a while.

    If the layers of the active migration cannot all be received (`cancels`), the next one drops them, and another
    decision follows.
    """
    upcoming, active = draft.state.switches.next, draft.state.active
    assert upcoming is not None
    assert active is not None
    discard(draft)
    if cancels and active.migration is not None:
        _update(draft, replace(draft.state.switches, following=(without_migration(active),)))
    scale_up = draft.state.scale_up.failed(draft.at.monotonic_s)
    draft.state = replace(draft.state, scale_up=scale_up)
    message = f"generation {upcoming.number} could not be prepared, and training continues without it: {error}"
    draft.record(decisions.Discarded(generation=upcoming.number, error=error, message=message))


def without_migration(active: GenerationSpec) -> GenerationSpec:
    """Return the generation that follows one during which layers move, and drops what has arrived of them."""
    return active.followed_by(plan=active.trained_plan, policy=_CANCELLED, action="the layers that moved are dropped")


def _switch_if_prepared(draft: Draft) -> None:
    state, upcoming = draft.state, draft.state.switches.next
    # A run that is ending does so in the generation that trains.
    if upcoming is None or upcoming.unprepared or state.phase is not Phase.TRAINING or state.ending is not None:
        return
    assert state.active is not None
    _update(draft, replace(draft.state.switches, next=replace(upcoming, is_switching=True)))
    for worker in state.active.plan.workers:
        draft.send(worker, messages.Switch(generation=upcoming.number))


def adopt(draft: Draft, message: messages.Committed) -> None:
    """Put the next generation in force: a worker has committed the step after which all switch to it."""
    state, switches, before, now = draft.state, draft.state.switches, draft.state.active, draft.at.unix_s
    if (upcoming := switches.underway) is None:
        return
    if state.phase is not Phase.TRAINING or message.generation != state.generation:
        return
    assert before is not None
    first_step, following = message.step + 1, switches.following[1:]
    active = replace(upcoming.spec.at(first_step), first_step=first_step)
    is_cancelled = active.policy == _CANCELLED
    # It was chosen for a smaller batch.
    is_outgrown = active.plan.micro_batches > upcoming.spec.plan.micro_batches
    migrate_s = max(0.0, upcoming.prepared_at - switches.migrating_at)
    migrated = switches.migrated.after(before.migration, migrate_s)
    # Orders would not reach all.
    is_cut_short = bool(following and state.reconnection.awaited)
    if before.migration is not None and not is_cancelled:
        draft.do(commands.MeasureMigration(before.migration, migrate_s))
    draft.begin_generation(active)
    draft.state = replace(
        draft.state,
        # Reports say later whether a worker holds the new placement.
        in_force=state.placed,
        switched_from=state.generation,
        switches=Switches(following=following, record=switches.record, migrated=migrated if following else Migrated()),
        incident=Incident(
            ended_at=now,
            stopped_at=now,
            decided_at=now,
            is_switch=True,
            is_provisional=is_cancelled or is_cut_short or is_outgrown,
            migrated=migrated,
        ),
    )
    if following or is_cancelled:
        _end_outcome(draft)
    else:
        _follow_outcome(draft, active)
    draft.do(commands.Task.BEGIN_GENERATION)
    had_layers = before.plan.placement.ranges
    for worker in active.participants:
        if worker not in had_layers:
            draft.send(
                worker,
                messages.Begin(
                    generation=upcoming.number, first_step=active.first_step, evaluate=message.vote.evaluates
                ),
            )
    if active.migration is not None:
        trained = tuple(worker for worker in active.plan.workers if worker in had_layers)
        draft.do(commands.Migrate(active, trained))
        _migrating(draft)
    checkpoints.switched(draft)
    snapshots.switched(draft)
    if is_cut_short:
        abandon(draft)
    else:
        resume(draft)


def _follow_outcome(draft: Draft, active: GenerationSpec) -> None:
    """Follow the outcome of the decision once its plan is in force."""
    outcomes, outcome = draft.state.outcomes.decided(
        generation=draft.state.generation,
        policy=active.policy,
        predicted_step_s=active.predicted_step_s,
        predicted_stall_s=active.predicted_stall_s,
        repeated_steps=0,
        now=draft.at.unix_s,
    )
    record_decision(draft, draft.state.switches.record)
    draft.do(commands.Task.FORGET_DECISIONS)
    draft.state = replace(draft.state, outcomes=outcomes)
    draft.record(outcome)


def _end_outcome(draft: Draft) -> None:
    """End the outcome of the decision in force: until the next plan, steps are no measure of it."""
    outcomes, outcome = draft.state.outcomes.ended()
    draft.state = replace(draft.state, outcomes=outcomes)
    draft.record(outcome)


def _update(draft: Draft, switches: Switches) -> None:
    draft.state = replace(draft.state, switches=switches)
