"""Detours: the hops that a micro-batch makes outside its own pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Hop, Plan

__all__ = ["detoured_hops", "disjoint_pipelines", "home_pipelines"]


def detoured_hops(plan: Plan, pipelines: Sequence[Sequence[int]]) -> frozenset[tuple[int, int]]:
    """The detours of a plan, each as (micro-batch, index of the hop in its route).

    A route is at home on the pipeline that most of its hops lie on. Of several, on one that has lost a worker, which is
    why its micro-batches make detours; and of several still, on the one that the route comes to first. A hop on a
    worker of another pipeline is a detour. Workers in no pipeline, such as those of a later re-partition, make none;
    nor does a route that runs on one other pipeline all the way, for no trace is left of where it came from.

    Args:
        plan: what is run.
        pipelines: the workers of each pipeline before anything failed; those that `plan` does not have are lost.

    Raises:
        PlanError: a worker is in two pipelines.
    """
    pipeline_of: dict[int, int] = {}
    for number, workers in enumerate(pipelines):
        for worker in workers:
            if pipeline_of.setdefault(worker, number) != number:
                raise PlanError(
                    f"worker {worker} is in pipelines {pipeline_of[worker]} and {number}; leave it in one of them"
                )
    live = frozenset(plan.workers)
    broken = frozenset(number for worker, number in pipeline_of.items() if worker not in live)
    # Many micro-batches take the same way.
    found: dict[tuple[Hop, ...], tuple[int, ...]] = {}
    for route in plan.routes:
        if route.hops not in found:
            found[route.hops] = tuple(_detours(route.hops, pipeline_of, broken))
    return frozenset((route.micro_batch, hop) for route in plan.routes for hop in found[route.hops])


def _detours(hops: Sequence[Hop], pipeline_of: Mapping[int, int], broken: frozenset[int]) -> list[int]:
    """Indices of the hops that are not on their route's home."""
    lies_on = Counter(pipeline_of[hop.worker] for hop in hops if hop.worker in pipeline_of)
    if len(lies_on) < 2:
        return []
    # A Counter keeps the order in which the route comes to its pipelines, and max takes the first of equals.
    home = max(lies_on, key=lambda pipeline: (lies_on[pipeline], pipeline in broken))
    return [index for index, hop in enumerate(hops) if pipeline_of.get(hop.worker, home) != home]


def disjoint_pipelines(plan: Plan) -> list[tuple[int, ...]]:
    """The pipelines of a plan by the workers of their stages, when nothing else is known of how it came about.

    Each is what the most micro-batches pass through of those that share no worker with an earlier one, so that detours
    are not taken for pipelines of their own.
    """
    chains = Counter(tuple(hop.worker for hop in route.hops) for route in plan.routes)
    pipelines: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for chain, _ in chains.most_common():
        if taken.isdisjoint(chain) and len(set(chain)) == len(chain):
            pipelines.append(chain)
            taken.update(chain)
    return sorted(pipelines)


def home_pipelines(plans: Sequence[Plan]) -> list[tuple[int, ...]]:
    """The pipelines that the last of some plans makes detours from.

    They are those of the newest plan for which layers moved: where all hold what they held, whatever else the routes
    do is a detour.

    Args:
        plans: what was in force, one after the other; one at least.
    """
    origin = plans[0]
    for plan in plans[1:]:
        if any(plan.placement.ranges_of(worker) != origin.placement.ranges_of(worker) for worker in plan.workers):
            origin = plan
    return disjoint_pipelines(origin)
