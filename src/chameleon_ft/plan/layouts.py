"""Layouts: pipelines side by side, each on workers of its own, and the detours of micro-batches to other pipelines."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """One pipeline.

    Attributes:
        cut_points: for each stage, the layer after its last one; the last of them is the number of layers.
        workers: the worker of each stage.
        micro_batches: its share of the global batch.

    Raises:
        PlanError: another number of workers than of stages, no stages, cut points that do not ascend from 1, or no
            micro-batches.
    """

    cut_points: tuple[int, ...]
    workers: tuple[int, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        if len(self.workers) != len(self.cut_points):
            raise PlanError(
                f"a pipeline needs a worker for each stage; got {len(self.workers)} for {len(self.cut_points)} stages"
            )
        if not self.cut_points or any(start >= stop for start, stop in pairwise((0, *self.cut_points))):
            raise PlanError(f"cut points must ascend from 1, one for each stage; got {self.cut_points}")
        if self.micro_batches < 1:
            raise PlanError(f"a pipeline needs at least one micro-batch; got {self.micro_batches}")

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The route of each of its micro-batches."""
        return pipeline_hops(self.workers, self.cut_points)


# Stages of one cut recur in many pipelines.
_layers: Final = lru_cache(maxsize=20_000)(LayerRange)


def pipeline_hops(workers: Sequence[int], cut_points: Sequence[int]) -> tuple[Hop, ...]:
    """Return the route through these workers, each of which has one stage."""
    return tuple(map(Hop, workers, map(_layers, (0, *cut_points[:-1]), cut_points)))


def pipelines_plan(
    pipelines: Sequence[PipelineLayout],
    *,
    split_backward: bool = False,
    recompute: Mapping[int, RecomputedLayers] = FrozenMap({}),
    fused_workers: frozenset[int] = frozenset(),
) -> Plan:
    """Return the plan of these pipelines, each with a contiguous share of the micro-batches; see `Plan` for the rest.

    Raises:
        PlanError: no pipelines, a worker in two stages, or pipelines of different numbers of layers.
    """
    if not pipelines:
        raise PlanError("a plan needs at least one pipeline; got none")
    workers = [worker for pipeline in pipelines for worker in pipeline.workers]
    if len(set(workers)) < len(workers):
        raise PlanError(f"a worker can have one stage of one pipeline; got {workers}")
    hops = [pipeline.hops for pipeline in pipelines]
    taken = [own for own, pipeline in zip(hops, pipelines, strict=True) for _ in range(pipeline.micro_batches)]
    held = {hop.worker: (hop.layers,) for own in hops for hop in own}
    return Plan(
        placement=Placement(pipelines[0].cut_points[-1], held),
        routes=tuple(map(Route, range(len(taken)), taken)),
        split_backward=split_backward,
        recompute=recompute,
        fused_workers=fused_workers,
    )


def split_layers(costs: Sequence[float], stages: int) -> tuple[LayerRange, ...]:
    """Cut the layers into `stages` contiguous ranges, none empty, so that the most expensive costs least.

    `costs` are the layers' costs in any one unit. Exact, by dynamic programming over (stages, layers); among equal
    optima the one with the earliest cuts, which leaves the longer ranges to the later stages: those keep fewer
    micro-batches in flight.

    Raises:
        PlanError: fewer than one stage, more stages than layers, or a cost that is negative or not finite.
    """
    num_layers = len(costs)
    if not 1 <= stages <= num_layers:
        raise PlanError(f"{num_layers} layers can be cut into 1 to {num_layers} stages, not {stages}; use fewer stages")
    if bad := [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]:
        raise PlanError(f"the cost of a layer must be zero or a positive number; got {bad[0]}")
    prefix = list(accumulate(costs, initial=0.0))
    # worst[j]: least largest cost of cutting the first j layers into the stages seen so far.
    worst = [math.inf, *prefix[1:]]
    cuts: list[list[int]] = []
    for stage in range(2, stages + 1):
        best = [math.inf] * (num_layers + 1)
        cut = [0] * (num_layers + 1)
        for stop in range(stage, num_layers + 1):
            for start in range(stage - 1, stop):
                value = max(worst[start], prefix[stop] - prefix[start])
                if value < best[stop]:
                    best[stop], cut[stop] = value, start
        worst = best
        cuts.append(cut)
    cut_points = [num_layers]
    for cut in reversed(cuts):
        cut_points.insert(0, cut[cut_points[0]])
    return tuple(LayerRange(start, stop) for start, stop in pairwise([0, *cut_points]))


def data_pipeline_plan(
    *,
    layer_costs: Sequence[float],
    dp: int,
    pp: int,
    micro_batches: int,
    workers: Sequence[int] | None = None,
    split_backward: bool = False,
) -> Plan:
    """Return `dp` pipelines of `pp` stages, each with an equal, contiguous share of the micro-batches.

    Stage s of pipeline d is on `workers[d * pp + s]` (worker d * pp + s when `workers` is None), and the layers are cut
    by `split_layers(layer_costs, pp)`.

    Raises:
        PlanError: a count below one, micro-batches that do not divide by `dp`, more stages than layers, or a list of
            workers that is not `dp * pp` different ones.
    """
    if dp < 1 or pp < 1 or micro_batches < 1:
        raise PlanError(f"dp, pp and micro_batches must be at least 1; got {dp}, {pp} and {micro_batches}")
    if micro_batches % dp:
        raise PlanError(
            f"{micro_batches} micro-batches cannot be shared equally by {dp} pipelines; "
            f"use a multiple of {dp}, such as {math.ceil(micro_batches / dp) * dp}"
        )
    ids = tuple(range(dp * pp)) if workers is None else tuple(workers)
    if len(ids) != dp * pp or len(set(ids)) != len(ids):
        raise PlanError(f"{dp} pipelines of {pp} stages need {dp * pp} different workers; got {ids}")
    cut_points = tuple(layers.stop for layers in split_layers(layer_costs, pp))
    groups = (ids[first : first + pp] for first in range(0, dp * pp, pp))
    return pipelines_plan(
        [PipelineLayout(cut_points, group, micro_batches // dp) for group in groups], split_backward=split_backward
    )


def with_micro_batches(plan: Plan, count: int) -> Plan:
    """Return the plan with another number of micro-batches, which its paths share in the same proportion."""
    if count == plan.micro_batches:
        return plan
    shares = Counter(route.hops for route in plan.routes)
    counts = proportional_shares(list(shares.values()), count)
    taken = [hops for hops, own in zip(shares, counts, strict=True) for _ in range(own)]
    return replace(plan, routes=tuple(map(Route, range(count), taken)))


def proportional_shares(weights: Sequence[float], micro_batches: int) -> list[int]:
    """Micro-batches of each pipeline: each in turn goes to the pipeline that would finish it first, by weight."""
    counts = [0] * len(weights)
    ends = [(1 / weight, number) for number, weight in enumerate(weights)]
    heapq.heapify(ends)
    for _ in range(micro_batches):
        _, number = ends[0]
        counts[number] += 1
        heapq.heapreplace(ends, ((counts[number] + 1) / weights[number], number))
    return counts


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
    """Return the indices of the hops that are not on their route's home."""
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
