"""Templates of Oobleck (Jang et al., SOSP 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_ft.plan.detours import disjoint_pipelines
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals.remap_workers import remap_workers
from chameleon_ft.search import FoundPlan, oobleck_plan

__all__ = ["propose"]


def propose(name: str, context: DecisionContext) -> list[Proposal]:
    """Propose the best combination of templates, and the running pipelines with templates of their new sizes.

    The latter is what the released code does after a loss, and moves less; see `oobleck_plan`. Programs are Oobleck's
    own (1F1B) where backward is fused in the plan; where it is split, they are ours, or Oobleck's if only these fit.
    Oobleck does not say which worker takes which place: those for which least moves on each host, and on any host.
    """
    live = set(context.live)
    nodes = [sum(worker in live for worker in pipeline) for pipeline in disjoint_pipelines(context.plan)]
    ways = (None, nodes) if context.lost and sum(nodes) == len(live) else (None,)
    found = [plan for way in ways if (plan := _planned(context, way)) is not None]
    if not found:
        return [Proposal(name=name, reason="no combination of templates fits the memory and uses all live workers")]
    return remap_workers(name, found, context)


def _planned(context: DecisionContext, live_nodes: Sequence[int] | None) -> FoundPlan | None:
    for split in dict.fromkeys((context.plan.split_backward, False)):
        chosen = oobleck_plan(
            context.costs, split_backward=split, live_nodes=live_nodes, with_room=True, current=context.held
        )
        if chosen is not None:
            return chosen.found
    return None
