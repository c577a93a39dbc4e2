"""Detours: the hops that a micro-batch makes outside its own pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Hop, Plan


def detoured_hops(plan: Plan, pipelines: Sequence[Sequence[int]]) -> frozenset[tuple[int, int]]:
    """Return the detours of a plan, each as (micro-batch, index of the hop in its route).

    A route's home is the pipeline of most of its hops. Ties go to a pipeline that has lost a worker, because
    its micro-batches make detours, and then to the one visited first. A hop on a worker of another pipeline is a
    detour. Workers in no pipeline, such as those of a later re-partition, make none; nor does a route that lies on one
    other pipeline throughout, because nothing shows where it came from.

    Args:
        plan: the active plan.
        pipelines: the workers of each pipeline before anything failed; workers that `plan` does not have are lost.

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
    # Many micro-batches share one sequence of hops.
    found = {hops: _detours(hops, pipeline_of, broken) for hops in {route.hops for route in plan.routes}}
    return frozenset((route.micro_batch, hop) for route in plan.routes for hop in found[route.hops])


def _detours(hops: Sequence[Hop], pipeline_of: Mapping[int, int], broken: frozenset[int]) -> list[int]:
    """Indices of the hops that are not on their route's home."""
    hops_on = Counter(pipeline_of[hop.worker] for hop in hops if hop.worker in pipeline_of)
    if len(hops_on) < 2:
        return []
    # A Counter keeps the order in which the route visits its pipelines, and max takes the first of equals.
    home = max(hops_on, key=lambda pipeline: (hops_on[pipeline], pipeline in broken))
    return [index for index, hop in enumerate(hops) if pipeline_of.get(hop.worker, home) != home]


def disjoint_pipelines(plan: Plan) -> list[tuple[int, ...]]:
    """Return the pipelines of a plan, by the workers of their stages, from its routes alone.

    Paths are taken in descending order of micro-batches, if they share no worker with an earlier one, so that detours
    do not count as pipelines.
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
    """Return the pipelines from which the last of some plans makes detours: those of the newest plan that moved layers.

    Args:
        plans: the plans in force, in order; at least one.
    """
    origin = plans[0]
    for plan in plans[1:]:
        if any(plan.placement.ranges_of(worker) != origin.placement.ranges_of(worker) for worker in plan.workers):
            origin = plan
    return disjoint_pipelines(origin)
