"""Oobleck (Jang et al., SOSP 2023): always its templates."""

from __future__ import annotations

from chameleon_ft.recovery.policies._in_roles import in_roles
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import oobleck_plan

__all__ = ["propose"]

_NAME = "oobleck"


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """The plan of `oobleck_plan`, with backward split if it was.

    Oobleck does not say which worker takes which place: those for which least moves on each host, and on any host.
    """
    found = oobleck_plan(situation.costs, split_backward=situation.plan.split_backward, current=situation.held)
    if found is None:
        return [Proposal(name=_NAME, reason="no combination of templates fits the memory and uses all live workers")]
    return in_roles(_NAME, [found.found], situation)
