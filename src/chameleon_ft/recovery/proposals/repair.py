"""Between rerouting and a re-partition: only pipelines that have lost a worker are cut anew."""

from __future__ import annotations

from collections.abc import Iterable

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals import reroute
from chameleon_ft.search import FoundPlan, recut_plan

__all__ = ["propose"]


def propose(name: str, context: DecisionContext, *, recuts: Iterable[FoundPlan] = ()) -> list[Proposal]:
    """Propose the plan of `recut_plan`, with backward split if it was: what moves stays within the broken pipelines.

    If all workers of the plan are live, and no others, the plan stays as it is.

    Args:
        name: of the proposal.
        context: what was running, and which workers are live.
        recuts: plans of `recut_plan` that are known already, if the placement is all that workers hold.
    """
    if unheld := context.placement.unheld_layers:
        return [Proposal(name=name, reason=str(NoHolderError(unheld)))]
    if context.live == context.plan.workers:
        return reroute.propose(name, context)
    split = context.plan.split_backward
    known = [each for each in recuts if each.plan.split_backward == split and context.holdings is None]
    found = next(iter(known), None) or recut_plan(
        context.costs, context.placement, split_backward=split, effort=context.effort
    )
    if found is None:
        reason = "no pipeline is whole, or its memory and that of repaired ones does not hold all micro-batches"
        return [Proposal(name=name, reason=reason)]
    return [Proposal(name=name, plan=found.plan, in_flight_limits=found.in_flight_limits, schedules=found.schedules)]
