"""The fastest pipelines of all live workers, whatever has to move for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.layout import replicated_layout, uniform_limits
from chameleon_ft.recovery.proposals.proposal import Proposal
from chameleon_ft.recovery.proposals.remap_workers import numbered, on_holders, remap_workers
from chameleon_ft.search import FoundPlan, InfeasibleError, SearchResult, find_plan

__all__ = ["repartition", "search"]

# Copies of the layers in additional plans, if the plans of the search have fewer; it finds plans with two itself.
_COPIES: Final = (3, 4, 6, 8)
# Share of the time until the next incident that the incident may cost before plans with more holders are searched for.
_SMALL: Final = 0.005


def search(context: DecisionContext, horizon_s: float) -> SearchResult | InfeasibleError:
    """Return the result of `find_plan`, or why it finds nothing.

    If there is no checkpoint, every layer has at least two holders, if that is possible. If there is one, and the best
    plan has layers with one holder, plans without such layers are added. If losses are so frequent that the number of
    peers that take over the work of a lost worker counts, plans with half as many holders again are added.

    Args:
        horizon_s: expected seconds until the next incident.
    """
    current = None if context.returns else context.held
    find = partial(find_plan, context.costs, current=current, effort=context.effort)
    try:
        found = find(least_holders=1 if context.has_checkpoints else 2)
    except InfeasibleError as error:
        return error
    fewest = _fewest_holders(found.best)
    more = fewest + (fewest + 1) // 2
    if fewest == 1:
        wants_more = context.has_checkpoints
    else:
        wants_more = context.salvages and found.best.step_s / (fewest - 1) > _SMALL * horizon_s
    if not wants_more or more > min(len(context.live), context.costs.workload.micro_batches):
        return found
    safer = find(least_holders=more)
    others = (each for each in (safer.best, *safer.alternatives) if _fewest_holders(each) > fewest)
    return replace(found, alternatives=(*found.alternatives, *others))


def repartition(name: str, found: SearchResult | InfeasibleError, context: DecisionContext) -> list[Proposal]:
    """Propose the plan that was found, slower ones that move less, and slower ones with more copies of the layers.

    If some layer has no holder any more and there is a checkpoint, all is read from it, and nothing has to move.
    """
    if isinstance(found, InfeasibleError):
        return [Proposal(name=name, reason=str(found))]
    plans = [found.best, *found.alternatives]
    if context.returns:
        name = "checkpoint"
        proposals = [
            Proposal.of(numbered(name, number), each, from_checkpoint=True)
            for number, each in enumerate(plans, start=1)
        ]
    else:
        proposals = remap_workers(name, plans, context)
    return [*proposals, *_replicated(name, context, max(map(_fewest_holders, plans)))]


def _replicated(prefix: str, context: DecisionContext, most: int) -> list[Proposal]:
    """Propose pipelines side by side, with each number of copies of the layers above `most`."""
    workload, hosts = context.costs.workload, context.costs.cluster.hosts
    if context.held.unheld_layers and not context.returns:
        return []
    workers = sorted(context.live, key=lambda worker: (hosts[worker], worker))
    proposals: list[Proposal] = []
    for copies in _COPIES:
        if not most < copies <= min(len(workers), workload.micro_batches):
            continue
        plan = replicated_layout(
            workers=workers,
            layer_costs=[layer.forward_s + layer.backward_s for layer in workload.layers],
            micro_batches=workload.micro_batches,
            copies=copies,
            split_backward=context.plan.split_backward,
        )
        plan = plan if context.returns else on_holders(plan, context)
        depth = max(len(route.hops) for route in plan.routes)
        proposals.append(
            Proposal(
                name=f"{prefix}-{copies}-copies",
                plan=plan,
                # As many in flight as help; if they do not fit the memory, it is scored with those of 1F1B.
                in_flight_limits=uniform_limits(plan.workers, 2 * depth - 1),
                from_checkpoint=context.returns,
            )
        )
    return proposals


def _fewest_holders(found: FoundPlan) -> int:
    return found.plan.placement.fewest_holders
