"""The unit of loss is a whole pipeline, as in per-replica fault tolerance."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.proposal import Proposal

__all__ = ["propose"]

_Hops = tuple[Hop, ...]


def propose(name: str, context: DecisionContext) -> list[Proposal]:
    """Drop pipelines that have lost a worker; what is left of them is idle.

    Their micro-batches go to the other pipelines, in proportion to what these have. As soon as there are as many idle
    workers as the first pipeline has stages, they make one like it.
    """
    plan = context.plan
    live = set(context.live)
    ways = Counter(route.hops for route in plan.routes)
    whole = [hops for hops in ways if all(hop.worker in live for hop in hops)]
    if not whole:
        return [Proposal(name=name, reason="every pipeline has lost a worker")]
    pipelines = [*whole, *_of_idle(whole, live)][: plan.micro_batches]
    if pipelines == whole and not context.lost:
        return [Proposal(name=name, plan=plan, in_flight_limits=context.in_flight_limits)]
    # Pipelines that are cut alike have as many micro-batches, give or take one.
    shares: dict[tuple[LayerRange, ...], list[int]] = defaultdict(list)
    for hops, share in ways.items():
        shares[_stages(hops)].append(share)
    taken = _shared([statistics.fmean(shares[_stages(hops)]) for hops in pipelines], pipelines, plan.micro_batches)
    used = set(taken)
    held = {hop.worker: plan.placement.ranges_of(hop.worker) for hops in whole if hops in used for hop in hops}
    held |= {hop.worker: (hop.layers,) for hops in pipelines[len(whole) :] if hops in used for hop in hops}
    placement = Placement(plan.placement.num_layers, held)
    # A worker of a pipeline that was idle recomputes as its counterpart in the pipeline that its own is like.
    like = {hop.worker: whole[0][stage] for hops in pipelines[len(whole) :] for stage, hop in enumerate(hops)}
    recompute: dict[int, RecomputedLayers] = {}
    fused = frozenset(own for own in held if (like[own].worker if own in like else own) in plan.fused_workers)
    for worker in held:
        if worker not in like:
            again = plan.recompute.get(worker)
        elif (again := plan.recompute.get(like[worker].worker)) is not None:
            again = again.intersection(like[worker].layers)
        if again is not None:
            recompute[worker] = again
    routes = tuple(map(Route, range(len(taken)), taken))
    in_flight_limits = {worker: limit for worker, limit in context.in_flight_limits.items() if worker in held}
    return [
        Proposal(
            name=name,
            plan=Plan(placement, routes, plan.split_backward, recompute, fused),
            in_flight_limits=in_flight_limits,
        )
    ]


def _stages(hops: _Hops) -> tuple[LayerRange, ...]:
    return tuple(hop.layers for hop in hops)


def _shared(weights: Sequence[float], pipelines: Sequence[_Hops], micro_batches: int) -> list[_Hops]:
    """The pipeline of each micro-batch: one after the other goes to where its end, by weight, is earliest."""
    ends = [(1 / weight, number, 1) for number, weight in enumerate(weights)]
    heapq.heapify(ends)
    counts = [0] * len(pipelines)
    for _ in range(micro_batches):
        _, number, share = ends[0]
        counts[number] = share
        heapq.heapreplace(ends, ((share + 1) / weights[number], number, share + 1))
    return [hops for hops, count in zip(pipelines, counts, strict=True) for _ in range(count)]


def _of_idle(whole: list[_Hops], live: set[int]) -> list[_Hops]:
    """Pipelines like the first one, of workers that hold nothing that counts."""
    idle = sorted(live.difference(hop.worker for hops in whole for hop in hops))
    layers = [hop.layers for hop in whole[0]]
    groups = zip(*[iter(idle)] * len(layers), strict=False)
    return [tuple(map(Hop, group, layers)) for group in groups]
