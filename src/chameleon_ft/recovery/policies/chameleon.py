"""Everything there is: nothing moves, a little does, or all that it takes."""

from __future__ import annotations

from chameleon_ft.recovery.policies import mend, repartition, reroute
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.search import InfeasibleError

__all__ = ["propose"]


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """What `reroute`, `mend` and `repartition` propose; the same plan with the same ceiling only once."""
    result = repartition.search(situation)
    recuts = () if isinstance(result, InfeasibleError) else result.recuts
    found: list[Proposal] = []
    for proposals in (
        reroute.propose(situation, horizon_s),
        mend.propose(situation, horizon_s, recuts=recuts),
        repartition.proposed(result, situation),
    ):
        known = [_of(each) for each in found if each.plan is not None]
        found += [each for each in proposals if _of(each) not in known]
    return found


def _of(proposal: Proposal) -> tuple[object, ...]:
    return proposal.plan, proposal.ceiling, proposal.from_checkpoint
