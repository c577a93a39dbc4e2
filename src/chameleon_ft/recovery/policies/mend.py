"""Between rerouting and a re-partition: only pipelines that have lost a worker are cut anew."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from chameleon_ft.estimate import one_f_one_b_bound_s, pipeline_bound_s, pipeline_times
from chameleon_ft.plan import Hop, Placement, Plan, Route, split_layers
from chameleon_ft.recovery.policies import reroute
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation
from chameleon_ft.schedule import default_limits

__all__ = ["propose"]

_NAME = "mend"
_Hops = tuple[Hop, ...]


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """Each pipeline that has lost workers goes on with those that are left of it, its layers cut evenly among them.

    The others keep their stages, so what moves stays within the broken pipelines. Live workers that hold nothing fill
    the gaps first, those of pipelines that were shortened before among them. Micro-batches are shared anew, each to the
    pipeline that ends earliest with it. Where no pipeline would change, the plan stays as it is.
    """
    pipelines = Counter(route.hops for route in situation.plan.routes)
    workers = [hop.worker for hops in pipelines for hop in hops]
    if len(set(workers)) < len(workers):
        return [Proposal(name=_NAME, reason="the plan has detours: there are no pipelines of their own to be mended")]
    mended = _mended(list(pipelines), situation)
    if mended == list(pipelines):
        return reroute.propose(situation, horizon_s, name=_NAME)
    if not mended:
        return [Proposal(name=_NAME, reason="no pipeline has a live worker, and none is idle")]
    # A worker that comes new into a pipeline recomputes if others in it do.
    old = situation.plan.recompute
    recompute = {hop.worker for hops in mended if any(each.worker in old for each in hops) for hop in hops}
    plan = _shared(mended, situation, frozenset(recompute))
    cut_anew = {hop.worker for hops in mended if hops not in pipelines for hop in hops}
    limits = default_limits(plan)
    kept = {worker: limit for worker, limit in situation.ceiling.items() if worker in limits}
    return [
        Proposal(name=_NAME, plan=plan, ceiling=kept | {worker: limits[worker] for worker in cut_anew & set(limits)})
    ]


def _mended(pipelines: Sequence[_Hops], situation: Situation) -> list[_Hops]:
    """The pipelines with only live workers, cut anew where they have changed."""
    costs_s = [layer.forward_s + layer.backward_s for layer in situation.costs.workload.layers]
    live = set(situation.live)
    idle = sorted(live - set(situation.plan.workers))
    depth = max(map(len, pipelines))
    found: list[_Hops] = []
    for hops in pipelines:
        workers: list[int] = []
        for hop in hops:
            if hop.worker in live:
                workers.append(hop.worker)
            elif idle:
                workers.append(idle.pop(0))
        while idle and len(workers) < depth:
            workers.append(idle.pop(0))
        if len(workers) == len(hops):
            cut = [hop.layers for hop in hops]
        else:
            cut = list(split_layers(costs_s, len(workers))) if workers else []
        if workers:
            found.append(tuple(map(Hop, workers, cut)))
    return found


def _shared(pipelines: Sequence[_Hops], situation: Situation, recompute: frozenset[int]) -> Plan:
    """The plan of these pipelines; those that are too slow to be given anything are left out."""
    split = situation.plan.split_backward
    times = [pipeline_times(hops, situation.costs, split_backward=split, recompute=recompute) for hops in pipelines]
    ends_s = pipeline_bound_s if split else one_f_one_b_bound_s
    shares = [0] * len(pipelines)
    earliest = [(ends_s(own, 1), index) for index, own in enumerate(times)]
    heapq.heapify(earliest)
    for _ in situation.plan.routes:
        _, index = earliest[0]
        shares[index] += 1
        heapq.heapreplace(earliest, (ends_s(times[index], shares[index] + 1), index))
    used = [(hops, share) for hops, share in zip(pipelines, shares, strict=True) if share]
    ways = [hops for hops, share in used for _ in range(share)]
    held = {hop.worker: (hop.layers,) for hops, _ in used for hop in hops}
    placement = Placement(situation.plan.placement.num_layers, held)
    return Plan(placement, tuple(map(Route, range(len(ways)), ways)), split, recompute.intersection(placement.workers))
