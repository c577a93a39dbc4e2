"""Detours: the peers of the lost workers do their share, and nothing moves."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.layout import in_flight_ceiling
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals._in_roles import numbered
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import reroute

__all__ = ["propose", "propose_decoupled"]


def propose(name: str, situation: Situation) -> list[Proposal]:
    """Propose the plan as `search.reroute` changes it; the plan as it is if no worker is lost."""
    try:
        plan = reroute(situation.plan, situation.lost, situation.costs, ceiling=situation.ceiling)
    except NoHolderError as error:
        return [Proposal(name=name, reason=str(error))]
    ceiling = {worker: limit for worker, limit in situation.ceiling.items() if worker in plan.workers}
    return [Proposal(name=name, plan=plan, ceiling=ceiling)]


def propose_decoupled(name: str, situation: Situation) -> list[Proposal]:
    """Propose the detours with backward split, up to one and two pipeline depths of micro-batches in flight.

    Nothing if backward is split in the plan already, no worker is lost, or some layer has no holder.
    """
    if situation.plan.split_backward or not situation.lost or situation.placement.unheld_layers:
        return []
    plan = replace(situation.plan, split_backward=True)
    depth = max(len(route.hops) for route in plan.routes)
    proposals: list[Proposal] = []
    for number, most in enumerate((depth, 2 * depth), start=1):
        decoupled = replace(situation, plan=plan, ceiling=in_flight_ceiling(plan.workers, most))
        proposals += propose(numbered(name, number), decoupled)
    return proposals
