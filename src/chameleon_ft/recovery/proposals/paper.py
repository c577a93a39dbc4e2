"""Re-partition and rerouting by the estimates of the Chameleon paper (arXiv 2508.21613)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from chameleon_ft.estimate import paper
from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.proposals.remap_workers import remap_workers
from chameleon_ft.schedule import OperationKind
from chameleon_ft.search import paper_plan
from chameleon_ft.transfer import transfer_s, transfer_to

__all__ = ["PaperRepartition", "repartition", "rerouted_s"]

_P = TypeVar("_P")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRepartition(Generic[_P]):
    """A full re-partition beside rerouting, by the paper's own estimates.

    Attributes:
        proposals: the plans of the re-partition.
        samples_per_s: what it trains until the next incident, (B / t_step) (D - t_transition) / D; None if it cannot be
            done.
        rerouted_samples_per_s: what rerouting trains; zero if it cannot be done.
    """

    proposals: Sequence[_P]
    samples_per_s: float | None
    rerouted_samples_per_s: float


def repartition(name: str, context: DecisionContext, horizon_s: float) -> PaperRepartition[Proposal]:
    """Propose the plan of `paper_plan`, with backward split if it was and if that fits.

    The estimates are the paper's, as they are reported (DESIGN section 12): t_step of rerouting by `rerouted_s`, whose
    t_transition is zero; t_step of the re-partition by `paper_plan`. Ours: its t_transition is that of our transfer.
    """
    splits = dict.fromkeys((context.plan.split_backward, False))
    plans = (paper_plan(context.costs, split_backward=split, current=context.held) for split in splits)
    found = next((plan for plan in plans if plan is not None), None)
    detour_s = rerouted_s(context)
    rerouted = 0.0 if detour_s == math.inf else _per_second(detour_s, 0.0, context, horizon_s)
    if found is None:
        reason = Proposal(name=name, reason="no pipelines of equal cuts fit the memory of all live workers")
        return PaperRepartition(proposals=[reason], samples_per_s=None, rerouted_samples_per_s=rerouted)
    moved = remap_workers(name, [found.found], context)
    plan = moved[0].plan
    rate = None if plan is None else _per_second(found.estimate_s, _transition_s(plan, context), context, horizon_s)
    return PaperRepartition(proposals=moved, samples_per_s=rate, rerouted_samples_per_s=rerouted)


def rerouted_s(context: DecisionContext) -> float:
    """Seconds of a step after rerouting by the paper's estimate; infinite where layers have no live holder.

    For equal pipelines, that is (N_pp + N_m - 1 + sum_i N_m F_i / (N_dp - F_i)) (t_f + t_b), with the times of the
    slowest stage. Of a plan that was rerouted before, N_dp is the most holders that a stage has. For unequal pipelines
    nothing is reported; the same detours, each with the times of its stage, are added to the time of unequal pipelines.
    If such a plan was rerouted before there is no estimate, and the time is infinite.
    """
    if context.placement.unheld_layers:
        return math.inf
    stages = _equal_stages(context.plan)
    return _of_unequal_s(context) if stages is None else _of_equal_s(stages, context)


def _equal_stages(plan: Plan) -> list[LayerRange] | None:
    """The stages that all pipelines have; None where they differ."""
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
    lost = set(context.lost)
    detours_s: list[float] = []
    times: list[tuple[tuple[float, ...], tuple[float, ...], int]] = []
    for hops, share in pipelines.items():
        forward_s, backward_s = zip(*(_stage_s(hop.layers, context) for hop in hops), strict=True)
        times.append((forward_s, backward_s, share))
        for hop, own_s in zip(hops, map(sum, zip(forward_s, backward_s, strict=True)), strict=True):
            if hop.worker in lost:
                fewest = min(len(context.placement.holders(layer)) for layer in hop.layers)
                detours_s.append(share * own_s / fewest)
    return paper.unequal_step_s(times) + math.fsum(detours_s)


def _stage_s(layers: LayerRange, context: DecisionContext) -> tuple[float, float]:
    """Seconds of F and of B. Workers are equal in the paper: the first live one stands for all."""
    worker, costs = context.live[0], context.costs
    return (
        costs.compute_s(worker, OperationKind.FORWARD, layers),
        costs.compute_s(worker, OperationKind.BACKWARD, layers),
    )


def _transition_s(plan: Plan, context: DecisionContext) -> float:
    layers, cluster = context.costs.workload.layers, context.costs.cluster
    transfer = transfer_to(context.held, plan.placement, live=context.live, layers=layers)
    return transfer_s(transfer.rounds, cluster)


def _per_second(step_s: float, transition_s: float, context: DecisionContext, horizon_s: float) -> float:
    return paper.samples_per_second(
        samples=context.costs.workload.samples,
        step_s=step_s,
        transition_s=transition_s,
        until_failure_s=horizon_s,
    )
