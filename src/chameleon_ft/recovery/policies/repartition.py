"""The fastest pipelines of all live workers, whatever has to move for them."""

from __future__ import annotations

from typing import Final

from chameleon_ft.recovery.policies._in_roles import in_roles
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import InfeasibleError, find_plan

__all__ = ["propose"]

_NAME: Final = "repartition"


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """The plan that `find_plan` finds, and those that are slower and move less.

    Where there is no checkpoint, every layer has at least two holders in them, if that can be.
    """
    try:
        found = find_plan(
            situation.costs,
            current=situation.held,
            two_holders=not situation.has_checkpoints,
            effort=situation.effort,
        )
    except InfeasibleError as error:
        return [Proposal(name=_NAME, reason=str(error))]
    return in_roles(_NAME, [found.best, *found.alternatives], situation)
