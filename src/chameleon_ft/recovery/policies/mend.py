"""Between rerouting and a re-partition: only pipelines that have lost a worker are cut anew."""

from __future__ import annotations

from typing import Final

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.policies import reroute
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import recut_plan

__all__ = ["propose"]

_NAME: Final = "mend"


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """The plan of `recut_plan`, with backward split if it was: what moves stays within the broken pipelines.

    Where all workers of the plan are there, and no others, the plan stays as it is.
    """
    if unheld := situation.placement.unheld_layers:
        return [Proposal(name=_NAME, reason=str(NoHolderError(unheld)))]
    if situation.live == situation.plan.workers:
        return reroute.propose(situation, horizon_s, name=_NAME)
    found = recut_plan(
        situation.costs,
        situation.placement,
        split_backward=situation.plan.split_backward,
        effort=situation.effort,
    )
    if found is None:
        reason = "no pipeline is whole, or its memory and that of mended ones does not hold all micro-batches"
        return [Proposal(name=_NAME, reason=reason)]
    return [Proposal(name=_NAME, plan=found.plan, ceiling=found.ceiling, solved=found.solved)]
