"""The plans that a run switches to while it trains: a better one, and before it, those in which its layers move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from chameleon_ft import recovery
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan, describe_pipelines, describe_transfer
from chameleon_ft.control.decisions.transition import plan_transition
from chameleon_ft.estimate import received_layers
from chameleon_ft.recovery import STAY, FailureModel
from chameleon_ft.recovery.courses import Course
from chameleon_ft.recovery.migration import pace_of
from chameleon_ft.recovery.scoring import missing_in_transfer
from chameleon_ft.recovery.waves import Wave, present_draft, waves_to
from chameleon_ft.schedule import CostModel, check_program
from chameleon_ft.transfer import transfer_s, transfer_to


def decide_on_switch(
    context: recovery.DecisionContext,
    policy: str,
    failures: FailureModel,
    *,
    migrates: bool,
    complete: Callable[[Sequence[RecoveryPlan]], tuple[RecoveryPlan, ...]] = tuple,
) -> tuple[recovery.Decision, tuple[RecoveryPlan, ...]]:
    """Decide, and return the decision with the plans to switch to, whose programs are checked; see `plans_to`.

    Args:
        complete: gives the plans their owners and keepers.
    """
    decision = recovery.decide(replace(context, migrates=migrates), policy, failures)
    return decision, complete(plans_to(decision, context, migrates=migrates))


def plans_to(
    decision: recovery.Decision, context: recovery.DecisionContext, *, migrates: bool
) -> tuple[RecoveryPlan, ...]:
    """Return the plans that lead to the decision's course, with the step at which they begin left open.

    None if the run is to continue as before. If layers move, two for each wave of `waves_to`: one during which they
    move, with the routes of the plan before, and one that uses them; the last is the course itself. If there is no
    wave, or not `migrates`, the course alone, with a transition before it trains.
    """
    course, chosen = decision.course, decision.chosen
    if course is None or chosen is None or chosen.policy == STAY:
        return ()
    layers = received_layers(context.costs.workload, course.plan.placement)
    # No layer is lost, so there is nothing to read from a checkpoint.
    senders = context.senders.hosts
    transfer = course.transfer or transfer_to(context.held, course.plan.placement, live=senders, layers=layers)
    assert chosen.step_s is not None
    costs = CostModel(context.costs.workload, context.senders)
    waves = waves_to(present_draft(context), transfer, costs) if migrates and transfer.messages else ()
    final = replace(
        _plan(
            course,
            chosen.policy,
            f"{describe_pipelines(course.plan)}; {describe_transfer(transfer, stops=not waves)}",
        ),
        predicted_step_s=chosen.step_s,
        predicted_stall_s=0.0,
    )
    if not transfer.messages:
        return (final,)
    if waves:
        every = (
            each
            for number, wave in enumerate(waves, 1)
            for each in _plans_of(wave, number, len(waves), context, final_step_s=chosen.step_s)
        )
        return (*every, final)
    # Of other policies than those that migrate, and of those that would read the layers from a checkpoint.
    if missing_in_transfer(transfer, context):
        return ()
    held = {worker: context.held.layers_of(worker) for worker in senders}
    transition = plan_transition(
        context.plan.placement, course.plan.placement, held=held, layers=layers, transfer=transfer
    )
    stall_s = transfer_s(transfer.rounds, context.senders) * context.transfer_factor
    return (replace(final, transition=transition, predicted_stall_s=stall_s),)


def _plans_of(
    wave: Wave, number: int, waves: int, context: recovery.DecisionContext, *, final_step_s: float
) -> list[RecoveryPlan]:
    """Return the plan under which the layers of a wave move, and the one that follows it, unless it is the course.

    A vote waits for the layers if another step under the first of the two would cost more time than they take, or if
    they would slow steps down for longer; see `pace_of`.
    """
    course = wave.migrating.course()
    assert course.transfer is not None
    step_s, pace = wave.migrating.estimate.step_s * context.step_factor, pace_of(wave, context)
    next_s = final_step_s if wave.reached is None else wave.reached.estimate.step_s * context.step_factor
    gain_s = step_s - next_s
    which = f", wave {number} of {waves}" if waves > 1 else ""
    migrating = replace(
        _plan(course, "migration", f"{describe_transfer(course.transfer, stops=False)}{which}"),
        migration=course.transfer,
        hold_s=gain_s if pace.moves_s < gain_s else pace.hold_s,
        migration_s=pace.moves_s,
        predicted_step_s=step_s,
    )
    if wave.reached is None:
        return [migrating]
    reached = wave.reached.course()
    return [migrating, _plan(reached, "migration", f"{describe_pipelines(reached.plan)}{which} has arrived")]


def _plan(course: Course, policy: str, action: str) -> RecoveryPlan:
    """Return a plan to switch to. Raises ProgramError if its program breaks a rule."""
    check_program(course.program, course.plan)
    return RecoveryPlan(
        plan=course.plan,
        in_flight_limits=course.in_flight_limits,
        first_step=0,
        load="keep",
        roll_forward=None,
        policy=policy,
        action=action,
        program=course.program,
        prepared=True,
        is_checked=True,
    )
