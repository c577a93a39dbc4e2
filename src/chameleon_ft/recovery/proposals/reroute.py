"""Detours: the peers of the lost workers do their share, and nothing moves."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.layout import uniform_limits
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals.remap_workers import numbered
from chameleon_ft.search import reroute

__all__ = ["propose", "propose_decoupled"]


def propose(name: str, context: DecisionContext) -> list[Proposal]:
    """Propose the plan as `search.reroute` changes it; the plan as it is if no worker is lost."""
    try:
        plan = reroute(context.plan, context.lost, context.costs, in_flight_limits=context.in_flight_limits)
    except NoHolderError as error:
        return [Proposal(name=name, reason=str(error))]
    in_flight_limits = {worker: limit for worker, limit in context.in_flight_limits.items() if worker in plan.workers}
    return [Proposal(name=name, plan=plan, in_flight_limits=in_flight_limits)]


def propose_decoupled(name: str, context: DecisionContext) -> list[Proposal]:
    """Propose the detours with backward split, up to one and two pipeline depths of micro-batches in flight.

    Nothing if backward is split in the plan already, no worker is lost, or some layer has no holder.
    """
    if context.plan.split_backward or not context.lost or context.placement.unheld_layers:
        return []
    plan = replace(context.plan, split_backward=True)
    depth = max(len(route.hops) for route in plan.routes)
    proposals: list[Proposal] = []
    for number, most in enumerate((depth, 2 * depth), start=1):
        decoupled = replace(context, plan=plan, in_flight_limits=uniform_limits(plan.workers, most))
        proposals += propose(numbered(name, number), decoupled)
    return proposals
