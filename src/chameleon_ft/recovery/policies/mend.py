"""Between rerouting and a re-partition: only pipelines that have lost a worker are cut anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.policies import reroute
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import FoundPlan, recut_plan

__all__ = ["propose"]

_NAME: Final = "mend"


def propose(situation: Situation, horizon_s: float, *, recuts: Iterable[FoundPlan] = ()) -> list[Proposal]:
    """The plan of `recut_plan`, with backward split if it was: what moves stays within the broken pipelines.

    Where all workers of the plan are there, and no others, the plan stays as it is.

    Args:
        situation: see `Policy`.
        horizon_s: likewise.
        recuts: plans of `recut_plan` that are known already, if the placement is all that workers hold.
    """
    if unheld := situation.placement.unheld_layers:
        return [Proposal(name=_NAME, reason=str(NoHolderError(unheld)))]
    if situation.live == situation.plan.workers:
        return reroute.propose(situation, horizon_s, name=_NAME)
    split = situation.plan.split_backward
    known = [each for each in recuts if each.plan.split_backward == split and situation.holdings is None]
    found = next(iter(known), None) or recut_plan(
        situation.costs, situation.placement, split_backward=split, effort=situation.effort
    )
    if found is None:
        reason = "no pipeline is whole, or its memory and that of mended ones does not hold all micro-batches"
        return [Proposal(name=_NAME, reason=reason)]
    return [Proposal(name=_NAME, plan=found.plan, ceiling=found.ceiling, schedules=found.schedules)]
