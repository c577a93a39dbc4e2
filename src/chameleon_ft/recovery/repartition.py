"""The fastest pipelines of all live workers, whatever has to move for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.recovery.layout import replicated_layout, uniform_limits
from chameleon_ft.recovery.proposal import Proposal, numbered, on_holders, remap_workers
from chameleon_ft.search import InfeasibleError, SearchResult, find_plan

# Copies of the layers in additional plans, if the plans of the search have fewer; it finds plans with two itself.
_COPIES: Final = (3, 4, 6, 8)
# Share of the time until the next incident. If more holders make the incident cheaper by less, none are searched for.
_NEGLIGIBLE: Final = 0.01


def search(context: DecisionContext, horizon_s: float) -> SearchResult | InfeasibleError:
    """Return the result of `find_plan`, or why it finds nothing.

    If there is no checkpoint, every layer has at least two holders, if that is possible. If there is one, and the best
    plan has layers with one holder, plans without such layers are added. If it has none, but losses are so frequent
    that half as many holders again would make the next one notably cheaper, such plans are.

    Args:
        horizon_s: expected seconds until the next incident.
    """
    found = _find(context, min_holders=1 if context.has_checkpoints else 2)
    if isinstance(found, InfeasibleError) and not context.has_checkpoints:
        found = _find(context, min_holders=1)
    if isinstance(found, InfeasibleError):
        return found
    fewest = found.best.plan.placement.fewest_holders
    wanted = fewest + (fewest + 1) // 2
    if fewest == 1:
        wants_more = context.has_checkpoints
    else:
        cheaper_s = found.best.step_s * context.step_factor * (1 / (fewest - 1) - 1 / (wanted - 1))
        wants_more = context.salvages and cheaper_s > _NEGLIGIBLE * horizon_s
    if not wants_more or wanted > min(len(context.live), context.costs.workload.micro_batches):
        return found
    replicated = _find(context, min_holders=wanted)
    if isinstance(replicated, InfeasibleError):
        return found
    return replace(found, alternatives=(*found.alternatives, replicated.best, *replicated.alternatives))


def _find(context: DecisionContext, *, min_holders: int) -> SearchResult | InfeasibleError:
    current = None if context.returns else context.held
    try:
        return find_plan(context.costs, current=current, min_holders=min_holders, effort=context.effort)
    except InfeasibleError as error:
        return error


def repartition(name: str, found: SearchResult | InfeasibleError, context: DecisionContext) -> list[Proposal]:
    """Propose the plan that was found, slower ones that move less, and slower ones with more copies of the layers.

    If some layer has no holder any more and there is a checkpoint, all is read from it, and nothing has to move. With a
    snapshot, layers come back on the workers that keep them.
    """
    if isinstance(found, InfeasibleError):
        return [Proposal(name=name, reason=str(found))]
    plans = [found.best, *found.alternatives]
    if context.returns:
        name = "checkpoint" if context.snapshots is None else "snapshot"
        proposals = [
            Proposal.of(numbered(name, number), each, from_checkpoint=True)
            for number, each in enumerate(plans, start=1)
        ]
    else:
        proposals = remap_workers(name, plans, context)
    return [*proposals, *_replicated(name, context, max(each.plan.placement.fewest_holders for each in plans))]


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
            layer_costs=workload.layer_times_s,
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
