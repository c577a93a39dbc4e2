"""Idle workers take the places of lost ones."""

from __future__ import annotations

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import reroute
from chameleon_ft.transfer import plan_in_roles

__all__ = ["propose"]


def propose(name: str, situation: Situation) -> list[Proposal]:
    """Propose `situation.home` with idle workers in the places of lost ones, and detours around places still empty."""
    home = situation.home
    if home is None:
        return []
    live = set(situation.live)
    # A worker that is back in its own place holds nothing either.
    idle = live.difference(home.workers) | live.difference(situation.plan.workers)
    back = idle.intersection(home.workers)
    empty = [worker for worker in home.workers if worker not in live]
    if not idle or not (back or empty):
        return []
    roles = dict(zip(home.workers, home.workers, strict=True)) | dict(zip(empty, sorted(idle - back), strict=False))
    left = empty[len(idle - back) :]
    ceiling = {
        roles[place]: limit for place, limit in situation.home_ceiling.items() if place in roles and place not in left
    }
    try:
        plan = reroute(plan_in_roles(home, roles), left, situation.costs, ceiling=ceiling)
    except NoHolderError as error:
        return [Proposal(name=name, reason=str(error))]
    return [Proposal(name=name, plan=plan, ceiling=ceiling)]
