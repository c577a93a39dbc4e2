"""The fastest pipelines of all live workers, whatever has to move for them."""

from __future__ import annotations

from typing import Final

from chameleon_ft.recovery.policies._in_roles import in_roles, numbered
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import InfeasibleError, SearchResult, find_plan

__all__ = ["propose", "proposed", "search"]

_NAME: Final = "repartition"
_ANEW: Final = "checkpoint"


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """The plan that `find_plan` finds, and those that are slower and move less.

    Where there is no checkpoint, every layer has at least two holders in them, if that can be. Where there is one, and
    some layer has no holder any more, all is read from it, and nothing has to move.
    """
    return proposed(search(situation), situation)


def search(situation: Situation) -> SearchResult | InfeasibleError:
    """What is found, or why nothing is."""
    try:
        return find_plan(
            situation.costs,
            current=None if _is_anew(situation) else situation.held,
            two_holders=not situation.has_checkpoints,
            effort=situation.effort,
        )
    except InfeasibleError as error:
        return error


def proposed(found: SearchResult | InfeasibleError, situation: Situation) -> list[Proposal]:
    """What `propose` makes of it."""
    if isinstance(found, InfeasibleError):
        return [Proposal(name=_NAME, reason=str(found))]
    plans = [found.best, *found.alternatives]
    if not _is_anew(situation):
        return in_roles(_NAME, plans, situation)
    return [
        Proposal(
            name=numbered(_ANEW, number),
            plan=each.plan,
            ceiling=each.ceiling,
            from_checkpoint=True,
            schedules=each.schedules,
        )
        for number, each in enumerate(plans, start=1)
    ]


def _is_anew(situation: Situation) -> bool:
    return situation.has_checkpoints and bool(situation.held.unheld_layers)
