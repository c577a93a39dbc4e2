"""The fastest pipelines of all live workers, whatever has to move for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.layout import replicated_layout, uniform_limits
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals.remap_workers import fewest_holders, numbered, on_holders, remap_workers
from chameleon_ft.search import FoundPlan, InfeasibleError, SearchResult, find_plan

__all__ = ["proposed", "proposed_anew", "search"]

_ANEW: Final = "checkpoint"
# Numbers of copies that plans are made with, where those of the search have fewer; of two, the search has its own.
_COPIES: Final = (3, 4, 6, 8)


def search(context: DecisionContext) -> SearchResult | InfeasibleError:
    """Return what `find_plan` finds, or why it finds nothing.

    If there is no checkpoint, every layer has at least two holders, if that can be. If there is one, and some plan has
    layers with one holder, plans without such layers are added.
    """
    costs, effort = context.costs, context.effort
    current = None if _is_anew(context) else context.held
    two_holders = not context.has_checkpoints
    try:
        found = find_plan(costs, current=current, two_holders=two_holders, effort=effort)
    except InfeasibleError as error:
        return error
    if two_holders or _fewest_holders(found.best) > 1:
        return found
    safer = find_plan(costs, current=current, two_holders=True, effort=effort)
    others = (each for each in (safer.best, *safer.alternatives) if _fewest_holders(each) > 1)
    return replace(found, alternatives=(*found.alternatives, *others))


def proposed(name: str, found: SearchResult | InfeasibleError, context: DecisionContext) -> list[Proposal]:
    """Propose the plan that was found, slower ones that move less, and slower ones with more copies of the layers.

    If some layer has no holder any more and there is a checkpoint, all is read from it, and nothing has to move.
    """
    if isinstance(found, InfeasibleError):
        return [Proposal(name=name, reason=str(found))]
    plans = [found.best, *found.alternatives]
    most = max(map(_fewest_holders, plans))
    if not _is_anew(context):
        return [*remap_workers(name, plans, context), *_replicated(name, context, most)]
    return [
        *(
            Proposal(
                name=numbered(_ANEW, number),
                plan=each.plan,
                in_flight_limits=each.in_flight_limits,
                from_checkpoint=True,
                schedules=each.schedules,
            )
            for number, each in enumerate(plans, start=1)
        ),
        *_replicated(_ANEW, context, most),
    ]


def proposed_anew(name: str, found: SearchResult | InfeasibleError, context: DecisionContext) -> list[Proposal]:
    """Propose to read the plan that was found from a checkpoint, with layers that could move as well.

    A stop costs minutes, but what is read needs no room beside what is held. If no worker is lost, a checkpoint is
    written first. None if there is no checkpoint, or some layer has no holder: then `proposed` has it.
    """
    may_begin_anew = context.has_checkpoints and (context.lost or context.saves_first)
    if isinstance(found, InfeasibleError) or not may_begin_anew:
        return []
    best = found.best
    anew = Proposal(
        name=name,
        plan=best.plan,
        in_flight_limits=best.in_flight_limits,
        from_checkpoint=True,
        schedules=best.schedules,
    )
    return [] if context.held.unheld_layers else [anew]


def _replicated(prefix: str, context: DecisionContext, most: int) -> list[Proposal]:
    """Propose pipelines side by side, each number of copies of the layers above `most`."""
    anew, workload = _is_anew(context), context.costs.workload
    if context.held.unheld_layers and not anew:
        return []
    hosts = context.costs.cluster.hosts
    workers = sorted(context.live, key=lambda worker: (hosts[worker], worker))
    found: list[Proposal] = []
    for copies in _COPIES:
        if most < copies <= min(len(workers), workload.micro_batches):
            plan = replicated_layout(
                workers=workers,
                layer_costs=[layer.forward_s + layer.backward_s for layer in workload.layers],
                micro_batches=workload.micro_batches,
                copies=copies,
                split_backward=context.plan.split_backward,
            )
            plan = plan if anew else on_holders(plan, context)
            depth = max(len(route.hops) for route in plan.routes)
            # As many in flight as help; if they do not fit, it is scored with those of 1F1B.
            in_flight_limits = uniform_limits(plan.workers, 2 * depth - 1)
            name = f"{prefix}-{copies}-copies"
            found.append(Proposal(name=name, plan=plan, in_flight_limits=in_flight_limits, from_checkpoint=anew))
    return found


def _fewest_holders(found: FoundPlan) -> int:
    return fewest_holders(found.plan.placement)


def _is_anew(context: DecisionContext) -> bool:
    return context.has_checkpoints and bool(context.held.unheld_layers)
