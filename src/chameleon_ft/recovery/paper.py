"""Re-partition and rerouting by the estimates of the Chameleon paper (arXiv 2508.21613); see `estimate.paper`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from chameleon_ft.cost import paper
from chameleon_ft.cost.transition import received_layers
from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal, remap_workers
from chameleon_ft.schedule import OperationKind
from chameleon_ft.search import paper_plan
from chameleon_ft.transfer import transfer_s, transfer_to


def propose(
    name: str, context: DecisionContext, horizon_s: float, *, reroute: Callable[[str], list[Proposal]]
) -> list[Proposal]:
    """Propose what the paper chooses: the plan of `paper_plan`, with backward split if it was and fits, or rerouting.

    The time of the transition is that of our transfer.

    Args:
        name: prefix of the names of the proposals.
        context: the active plan, and which workers are live.
        horizon_s: expected seconds until the next incident.
        reroute: proposes rerouting under a name.
    """
    splits = dict.fromkeys((context.plan.split_backward, False))
    plans = (paper_plan(context.costs, split_backward=split, current=context.held) for split in splits)
    found = next((plan for plan in plans if plan is not None), None)
    step_s, transition_s = math.inf, 0.0
    if found is None:
        reason = "no pipelines of equal cuts fit the memory of all live workers"
        moved = [Proposal(name=f"{name}-repartition", reason=reason)]
    else:
        moved = remap_workers(f"{name}-repartition", [found.found], context)
        if (plan := moved[0].plan) is not None:
            layers, senders = received_layers(context.costs.workload, plan.placement), context.senders
            transfer = transfer_to(context.held, plan.placement, live=senders.hosts, layers=layers)
            step_s, transition_s = found.estimate_s, transfer_s(transfer.rounds, senders)
    reroutes = prefers_rerouting(
        samples=context.costs.workload.samples,
        step_s=step_s,
        transition_s=transition_s,
        rerouted_s=rerouted_s(context),
        horizon_s=horizon_s,
    )
    return reroute(f"{name}-reroute") if reroutes else moved


def prefers_rerouting(*, samples: int, step_s: float, transition_s: float, rerouted_s: float, horizon_s: float) -> bool:
    """Return whether rerouting trains at least as much as a re-partition by (B / t_step) (D - t_transition) / D.

    Args:
        samples: of a step (B).
        step_s: seconds of a step after the re-partition; infinite if there is none.
        transition_s: seconds of its transition; rerouting takes none.
        rerouted_s: seconds of a step after rerouting; infinite if that is not possible.
        horizon_s: expected seconds until the next incident (D).
    """
    repartitioned_per_s, rerouted_per_s = (
        paper.samples_per_second(samples=samples, step_s=each_s, transition_s=stall_s, until_failure_s=horizon_s)
        for each_s, stall_s in ((step_s, transition_s), (rerouted_s, 0.0))
    )
    return 0 < rerouted_per_s >= repartitioned_per_s


def rerouted_s(context: DecisionContext) -> float:
    """Return the paper's estimate of a step after rerouting, in seconds; infinite if layers have no live holder.

    For equal pipelines, that is (N_pp + N_m - 1 + sum_i N_m F_i / (N_dp - F_i)) (t_f + t_b), with the times of the
    slowest stage. If the plan has been rerouted before, N_dp is the most holders that a stage has. For unequal
    pipelines nothing is reported; the detours, each with the times of its stage, are added to the time of unequal
    pipelines. If such a plan has been rerouted before, there is no estimate, and the time is infinite.
    """
    if context.placement.unheld_layers:
        return math.inf
    stages = _equal_stages(context.plan)
    return _of_unequal_s(context) if stages is None else _of_equal_s(stages, context)


def _equal_stages(plan: Plan) -> list[LayerRange] | None:
    """Return the stages that all pipelines have; None if they differ."""
    ranges = list(plan.placement.ranges.values())
    stages = sorted({own for held in ranges for own in held})
    one_each = all(len(held) == 1 for held in ranges)
    tiled = all(before.stop == after.start for before, after in pairwise(stages))
    return stages if one_each and tiled else None


def _of_equal_s(stages: list[LayerRange], context: DecisionContext) -> float:
    holders = [len(context.placement.holders(stage.start)) for stage in stages]
    pipelines = max(len(context.plan.placement.holders(stage.start)) for stage in stages)
    forward_s, backward_s = zip(*(_stage_s(stage, context) for stage in stages), strict=True)
    return paper.rerouted_step_s(
        stages=len(stages),
        micro_batches=math.ceil(context.plan.micro_batches / pipelines),
        pipelines=pipelines,
        failures=[pipelines - live for live in holders],
        forward_s=max(forward_s),
        backward_s=max(backward_s),
    )


def _of_unequal_s(context: DecisionContext) -> float:
    pipelines = Counter(route.hops for route in context.plan.routes)
    workers = [hop.worker for hops in pipelines for hop in hops]
    if len(set(workers)) < len(workers):
        return math.inf
    detours_s: list[float] = []
    times: list[tuple[tuple[float, ...], tuple[float, ...], int]] = []
    for hops, share in pipelines.items():
        forward_s, backward_s = zip(*(_stage_s(hop.layers, context) for hop in hops), strict=True)
        times.append((forward_s, backward_s, share))
        for hop, own_s in zip(hops, map(sum, zip(forward_s, backward_s, strict=True)), strict=True):
            if hop.worker in context.lost:
                fewest = min(len(context.placement.holders(layer)) for layer in hop.layers)
                detours_s.append(share * own_s / fewest)
    return paper.unequal_step_s(times) + math.fsum(detours_s)


def _stage_s(layers: LayerRange, context: DecisionContext) -> tuple[float, float]:
    """Return the seconds of F and of B. All workers are equal in the paper, so any live one will do."""
    worker, costs = context.live[0], context.costs
    return (
        costs.compute_s(worker, OperationKind.FORWARD, layers),
        costs.compute_s(worker, OperationKind.BACKWARD, layers),
    )
