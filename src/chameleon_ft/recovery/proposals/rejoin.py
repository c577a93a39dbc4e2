"""Idle workers take the places of lost ones."""

from __future__ import annotations

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.search import reroute
from chameleon_ft.transfer import remap_plan

__all__ = ["propose"]


def propose(name: str, context: DecisionContext) -> list[Proposal]:
    """Propose `context.home` with idle workers in the places of lost ones, and detours around places still empty."""
    home = context.home
    if home is None:
        return []
    live = set(context.live)
    # A worker that is back in its own place holds nothing either.
    idle = live.difference(home.workers) | live.difference(context.plan.workers)
    back = idle.intersection(home.workers)
    empty = [worker for worker in home.workers if worker not in live]
    if not idle or not (back or empty):
        return []
    roles = dict(zip(home.workers, home.workers, strict=True)) | dict(zip(empty, sorted(idle - back), strict=False))
    left = empty[len(idle - back) :]
    in_flight_limits = {
        roles[place]: limit
        for place, limit in context.home_in_flight_limits.items()
        if place in roles and place not in left
    }
    try:
        plan = reroute(remap_plan(home, roles), left, context.costs, in_flight_limits=in_flight_limits)
    except NoHolderError as error:
        return [Proposal(name=name, reason=str(error))]
    return [Proposal(name=name, plan=plan, in_flight_limits=in_flight_limits)]
