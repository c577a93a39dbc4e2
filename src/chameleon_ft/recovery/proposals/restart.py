"""All workers start again from a checkpoint."""

from __future__ import annotations

from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.layout import largest_symmetric_layout
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.schedule import default_limits

__all__ = ["propose"]


def propose(name: str, context: DecisionContext) -> list[Proposal]:
    """Propose the largest layout of equal pipelines, of the depth of the plan if that can be.

    A run does not start again for a worker that joins: it waits for the next loss.
    """
    if not context.lost:
        return []
    plan = largest_symmetric_layout(
        live=context.live,
        layer_costs=[layer.forward_s + layer.backward_s for layer in context.costs.workload.layers],
        micro_batches=context.costs.workload.micro_batches,
        preferred_pp=max(len(route.hops) for route in context.plan.routes),
        split_backward=context.plan.split_backward,
    )
    return [Proposal(name=name, plan=plan, in_flight_limits=default_limits(plan), from_checkpoint=True)]
