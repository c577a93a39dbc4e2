"""The unit of loss is a whole pipeline, as in per-replica fault tolerance."""

from __future__ import annotations

from chameleon_ft.plan import Hop, Placement, Plan, Route
from chameleon_ft.recovery.proposal import Proposal
from chameleon_ft.recovery.situation import Situation

__all__ = ["propose"]

_NAME = "drop-replica"
_Hops = tuple[Hop, ...]


def propose(situation: Situation, horizon_s: float) -> list[Proposal]:
    """Pipelines that have lost a worker are dropped, and what is left of them is idle.

    Their micro-batches go to the other pipelines, so that all have as many, give or take one. As soon as there are as
    many idle workers as a pipeline has stages, they make one again.
    """
    plan = situation.plan
    live = set(situation.live)
    ways = dict.fromkeys(route.hops for route in plan.routes)
    whole = [hops for hops in ways if all(hop.worker in live for hop in hops)]
    if not whole:
        return [Proposal(name=_NAME, reason="every pipeline has lost a worker")]
    pipelines = [*whole, *_of_idle(whole, live)][: plan.micro_batches]
    if pipelines == whole and not situation.lost:
        return [Proposal(name=_NAME, plan=plan, ceiling=situation.ceiling)]
    taken = [pipelines[number * len(pipelines) // plan.micro_batches] for number in range(plan.micro_batches)]
    held = {hop.worker: plan.placement.ranges_of(hop.worker) for hops in whole for hop in hops}
    held |= {hop.worker: (hop.layers,) for hops in pipelines[len(whole) :] for hop in hops}
    placement = Placement(plan.placement.num_layers, held)
    recompute = plan.recompute.intersection(placement.workers)
    routes = tuple(map(Route, range(len(taken)), taken))
    ceiling = {worker: limit for worker, limit in situation.ceiling.items() if worker in held}
    return [Proposal(name=_NAME, plan=Plan(placement, routes, plan.split_backward, recompute), ceiling=ceiling)]


def _of_idle(whole: list[_Hops], live: set[int]) -> list[_Hops]:
    """Pipelines like the first one, of workers that hold nothing that counts."""
    idle = sorted(live.difference(hop.worker for hops in whole for hop in hops))
    layers = [hop.layers for hop in whole[0]]
    groups = zip(*[iter(idle)] * len(layers), strict=False)
    return [tuple(map(Hop, group, layers)) for group in groups]
