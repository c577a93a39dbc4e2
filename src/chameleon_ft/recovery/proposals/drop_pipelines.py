"""Per-replica fault tolerance: the unit of loss is a whole pipeline."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposals.proposal import Proposal


def drop_pipelines(name: str, context: DecisionContext) -> Proposal:
    """Drop pipelines that have lost a worker; their other workers are idle.

    Their micro-batches go to the other pipelines, in proportion to what these have. As soon as there are as many idle
    workers as the first pipeline has stages, they form one like it.
    """
    plan, live = context.plan, set(context.live)
    micro_batches = Counter(route.hops for route in plan.routes)
    whole = [hops for hops in micro_batches if all(hop.worker in live for hop in hops)]
    if not whole:
        return Proposal(name=name, reason="every pipeline has lost a worker")
    template = whole[0]
    idle = iter(sorted(live.difference(hop.worker for hops in whole for hop in hops)))
    formed = [
        tuple(Hop(worker, hop.layers) for worker, hop in zip(group, template, strict=True))
        for group in zip(*[idle] * len(template), strict=False)
    ]
    pipelines = [*whole, *formed][: plan.micro_batches]
    if pipelines == whole and not context.lost:
        return Proposal(name=name, plan=plan, in_flight_limits=context.in_flight_limits)
    # Pipelines with equal cuts get equal shares, give or take one.
    shares: dict[tuple[LayerRange, ...], list[int]] = defaultdict(list)
    for hops, share in micro_batches.items():
        shares[_stages(hops)].append(share)
    counts = _proportional([statistics.fmean(shares[_stages(hops)]) for hops in pipelines], plan.micro_batches)
    used = [(hops, count) for hops, count in zip(pipelines, counts, strict=True) if count]
    taken = [hops for hops, count in used for _ in range(count)]
    # A formed pipeline runs like the first one: each worker recomputes, and splits its backward, as its counterpart.
    counterparts = {hop.worker: model for hops in formed for hop, model in zip(hops, template, strict=True)}
    held, recompute, fused = {}, {}, set()
    for hop in (hop for hops, _ in used for hop in hops):
        model = counterparts.get(hop.worker)
        counterpart = hop.worker if model is None else model.worker
        held[hop.worker] = plan.placement.ranges_of(hop.worker) if model is None else (hop.layers,)
        own = plan.recompute.get(counterpart)
        if own is not None and (own := own if model is None else own.intersection(model.layers)) is not None:
            recompute[hop.worker] = own
        if counterpart in plan.fused_workers:
            fused.add(hop.worker)
    changed = Plan(
        Placement(plan.placement.num_layers, held),
        tuple(map(Route, range(len(taken)), taken)),
        plan.split_backward,
        recompute,
        frozenset(fused),
    )
    limits = {worker: limit for worker, limit in context.in_flight_limits.items() if worker in held}
    return Proposal(name=name, plan=changed, in_flight_limits=limits)


def _stages(hops: Sequence[Hop]) -> tuple[LayerRange, ...]:
    return tuple(hop.layers for hop in hops)


def _proportional(weights: Sequence[float], micro_batches: int) -> list[int]:
    """Micro-batches of each pipeline: each in turn goes to the pipeline that would finish it first, by weight."""
    counts = [0] * len(weights)
    ends = [(1 / weight, number) for number, weight in enumerate(weights)]
    heapq.heapify(ends)
    for _ in range(micro_batches):
        _, number = ends[0]
        counts[number] += 1
        heapq.heapreplace(ends, ((counts[number] + 1) / weights[number], number))
    return counts
