"""The plans that a run switches to while it trains: a better one, and before it, one in which its layers move."""

from __future__ import annotations

import math
from dataclasses import replace

from chameleon_ft import recovery
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan, describe_pipelines, describe_transfer
from chameleon_ft.control.decisions.transition import plan_transition
from chameleon_ft.estimate import program_memory
from chameleon_ft.plan import Placement
from chameleon_ft.recovery import STAY, FailureModel, with_shadow_holders
from chameleon_ft.recovery.scoring import missing_in_transfer
from chameleon_ft.schedule import CostModel, best_program, check_program
from chameleon_ft.transfer import Transfer, transfer_s, transfer_to

__all__ = ["decide_on_switch", "plans_to"]


def decide_on_switch(
    context: recovery.DecisionContext, policy: str, failures: FailureModel, *, migrates: bool
) -> tuple[recovery.Decision, tuple[RecoveryPlan, ...]]:
    """Decide, and return the decision with the plans to switch to, whose programs are checked; see `plans_to`."""
    decision = recovery.decide(replace(context, migrates=migrates), policy, failures)
    return decision, plans_to(decision, context, migrates=migrates)


def plans_to(
    decision: recovery.Decision, context: recovery.DecisionContext, *, migrates: bool
) -> tuple[RecoveryPlan, ...]:
    """Return the plans that lead to the decision's course, with the step at which they begin left open.

    None if the run is to continue as before. If layers move, two: one with the routes of the present plan, during which
    they move, and the course itself. If their receivers lack memory for that, or not `migrates`, the course alone, with
    a transition before it trains.
    """
    course, chosen = decision.course, decision.chosen
    if course is None or chosen is None or chosen.policy == STAY:
        return ()
    layers = context.costs.workload.layers
    # No layer is lost, so there is nothing to read from a checkpoint.
    senders = context.senders.hosts
    transfer = course.transfer or transfer_to(context.held, course.plan.placement, live=senders, layers=layers)
    check_program(course.program, course.plan)
    moved = describe_transfer(transfer)
    final = RecoveryPlan(
        plan=course.plan,
        in_flight_limits=course.in_flight_limits,
        first_step=0,
        load="keep",
        roll_forward=None,
        policy=chosen.policy,
        action=f"{describe_pipelines(course.plan)}; {moved}",
        predicted_step_s=chosen.step_s,
        predicted_stall_s=0.0,
        program=course.program,
        prepared=True,
    )
    if not transfer.messages:
        return (final,)
    migration = _migration(context, course.plan.placement, transfer) if migrates else None
    if migration is not None:
        step_s = chosen.migration_step_s if math.isfinite(chosen.migration_step_s) else None
        return replace(migration, predicted_step_s=step_s), final
    # A policy that would read the layers from a checkpoint has no transfer of its own, whose memory was checked.
    if course.transfer is None and missing_in_transfer(transfer, context):
        return ()
    held = {worker: _layers(context.held, worker) for worker in senders}
    transition = plan_transition(
        context.plan.placement, course.plan.placement, held=held, layers=layers, transfer=transfer
    )
    stall_s = transfer_s(transfer.rounds, context.senders) * context.transfer_factor
    return (replace(final, transition=transition, predicted_stall_s=stall_s),)


def _migration(context: recovery.DecisionContext, target: Placement, transfer: Transfer) -> RecoveryPlan | None:
    """Return the plan under which layers move beside training; None if a receiver lacks the memory."""
    plan, costs = with_shadow_holders(context.plan, target), CostModel(context.costs.workload, context.senders)
    program = best_program(plan, costs, in_flight_limits=context.in_flight_limits).program
    memory = program_memory(program, plan.placement, costs.workload)
    for worker in {message.destination for message in transfer.messages}:
        capacity = costs.cluster.worker(worker).memory_bytes
        if capacity is not None and memory[worker].peak_bytes > capacity:
            return None
    check_program(program, plan)
    return RecoveryPlan(
        plan=plan,
        in_flight_limits=context.in_flight_limits,
        first_step=0,
        load="keep",
        roll_forward=None,
        policy="migration",
        action=f"{describe_transfer(transfer)} beside training",
        migration=transfer,
        program=program,
        prepared=True,
    )


def _layers(placement: Placement, worker: int) -> tuple[int, ...]:
    return tuple(layer for layers in placement.ranges_of(worker) for layer in layers)
