"""All workers start again from a checkpoint."""

from __future__ import annotations

from chameleon_ft.recovery.layout import largest_symmetric_layout
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.schedule import default_limits

__all__ = ["propose"]


def propose(name: str, situation: Situation) -> list[Proposal]:
    """Propose the largest layout of equal pipelines, of the depth of the plan if that can be.

    A run does not start again for a worker that joins: it waits for the next loss.
    """
    if not situation.lost:
        return []
    plan = largest_symmetric_layout(
        live=situation.live,
        layer_costs=[layer.forward_s + layer.backward_s for layer in situation.costs.workload.layers],
        micro_batches=situation.costs.workload.micro_batches,
        preferred_pp=max(len(route.hops) for route in situation.plan.routes),
        split_backward=situation.plan.split_backward,
    )
    return [Proposal(name=name, plan=plan, ceiling=default_limits(plan), from_checkpoint=True)]
