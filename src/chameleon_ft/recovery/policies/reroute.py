"""The peers of the lost workers do their share; nothing moves."""

from __future__ import annotations

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import reroute

__all__ = ["propose"]


def propose(situation: Situation, horizon_s: float, *, name: str = "reroute") -> list[Proposal]:
    """The plan as `search.reroute` changes it; the plan as it is where nobody is lost."""
    try:
        plan = reroute(situation.plan, situation.lost, situation.costs, ceiling=situation.ceiling)
    except NoHolderError as error:
        return [Proposal(name=name, reason=str(error))]
    ceiling = {worker: limit for worker, limit in situation.ceiling.items() if worker in plan.workers}
    return [Proposal(name=name, plan=plan, ceiling=ceiling)]
