"""The fastest pipelines of all live workers, whatever has to move for them."""

from __future__ import annotations

from typing import Final

from chameleon_ft.recovery.policies._in_roles import in_roles
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import InfeasibleError, SearchResult, find_plan

__all__ = ["propose"]

_NAME: Final = "repartition"
# By how much more is searched where nothing was found although something fits.
_FURTHER: Final = 10


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """The plan that `find_plan` finds, and those that are slower and move less."""
    try:
        found = _found(situation)
    except InfeasibleError as error:
        return [Proposal(name=_NAME, reason=str(error))]
    return in_roles(_NAME, [found.best, *found.alternatives], situation)


def _found(situation: Situation) -> SearchResult:
    costs, current, effort = situation.costs, situation.placement, situation.effort
    try:
        return find_plan(costs, current=current, effort=effort)
    except InfeasibleError as error:
        # A small effort can end before it comes to the pipelines that fit, deep ones that take long to schedule.
        if effort is None or error.workers_needed is None or error.workers_needed > len(situation.live):
            raise
    return find_plan(costs, current=current, effort=_FURTHER * effort)
