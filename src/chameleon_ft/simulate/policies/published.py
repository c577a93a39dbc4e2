"""Published planners by class: Oobleck's templates, and the paper's choice by its own estimates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cache

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.estimate import paper as reported
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.oobleck import pipeline_templates
from chameleon_ft.simulate.fleet import Fleet, arranged
from chameleon_ft.simulate.knapsack import EstimatedMixes
from chameleon_ft.simulate.pipelines import Cut, PipelineClass
from chameleon_ft.simulate.planner import Option, Outlook
from chameleon_ft.simulate.policies.standing import as_it_is
from chameleon_ft.simulate.world import World

__all__ = ["oobleck", "paper"]


def oobleck(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """The best combination of Oobleck's templates that uses up the workers, or as many of them as it can."""
    mixes, cuts = world.noted("oobleck", _oobleck_mixes)
    options = [] if outlook.lost & fleet.used or fleet.has_gaps else as_it_is(world, fleet, outlook, "as-it-is")
    chosen = _chosen(mixes, cuts, fleet, outlook)
    option = None if chosen is None else world.option("oobleck", chosen[0], fleet, outlook)
    return options if option is None else [*options, option]


def paper(world: World, fleet: Fleet, outlook: Outlook) -> list[Option]:
    """Full reroute or full re-partition, whichever is better by (B / t_step) (D - t_transition) / D of the paper."""
    mixes, cuts = world.noted("paper", _paper_mixes)
    stays = as_it_is(world, fleet, outlook, "paper-reroute")
    chosen = _chosen(mixes, cuts, fleet, outlook)
    option = None if chosen is None else world.option("paper-repartition", chosen[0], fleet, outlook)
    if chosen is None or option is None:
        return stays
    moves_s = max(0.0, option.stall_s - world.phases(outlook).total_s)
    detour_s = _rerouted_s(world, fleet)
    samples, horizon_s = world.costs.workload.samples, outlook.horizon_s
    better = reported.samples_per_second(
        samples=samples, step_s=chosen[1], transition_s=moves_s, until_failure_s=horizon_s
    )
    if detour_s == math.inf or not stays:
        return [option]
    detoured = reported.samples_per_second(
        samples=samples, step_s=detour_s, transition_s=0.0, until_failure_s=horizon_s
    )
    return [option] if better > detoured else stays


def _chosen(mixes: EstimatedMixes, cuts: dict[int, Cut], fleet: Fleet, outlook: Outlook) -> tuple[Fleet, float] | None:
    """The pipelines and their estimate. Workers are equal to these planners, slow ones as well."""
    workers = len(outlook.speeds)
    found = next((mix for left in range(workers, 0, -1) if (mix := mixes.fastest(left)) is not None), None)
    if found is None:
        return None
    counts, estimate_s = found
    made = arranged({cuts[depth]: count for depth, count in counts.items()}, sorted(outlook.speeds), fleet)
    return (fleet if set(made.pipelines) == set(fleet.pipelines) else made), estimate_s


def _oobleck_mixes(world: World) -> tuple[EstimatedMixes, dict[int, Cut]]:
    cluster = world.costs.cluster
    # Templates depend on the number of workers only where these are fewer than the layers.
    few = min(len(cluster.workers), 2 * world.pipelines.num_layers)
    workers = tuple(Worker(number, "host", 1.0, world.pipelines.memory_bytes) for number in range(few))
    costs = CostModel(world.costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host))
    templates = pipeline_templates(costs, split_backward=world.pipelines.split_backward)
    cuts = {nodes: _cut_that_fits(world, Cut(template.stops)) for nodes, template in templates.items()}
    cuts = {nodes: cut for nodes, cut in cuts.items() if cut is not None}

    def most(nodes: int, time_s: float) -> int:
        first_s = templates[nodes].iteration_s(0)
        return max(0, math.floor((time_s - first_s) / templates[nodes].slowest_s + 1e-9))

    return EstimatedMixes(list(cuts), most, world.times.micro_batches), {n: c for n, c in cuts.items() if c is not None}


def _paper_mixes(world: World) -> tuple[EstimatedMixes, dict[int, Cut]]:
    workers = len(world.workers)
    depths = range(1, min(workers, world.pipelines.num_layers) + 1)
    cuts = {depth: cut for depth in depths if (cut := _cut_that_fits(world, world.pipelines.even_cut(depth)))}

    @cache
    def line(depth: int) -> tuple[float, float]:
        """First micro-batch and period, which 1F1B of enough micro-batches has."""
        forward_s, backward_s = _stage_times(world, cuts[depth])
        many = max(2 * depth, world.times.micro_batches * depth // workers)
        one_s, two_s = (
            reported.pipeline_step_s(forward_s=forward_s, backward_s=backward_s, micro_batches=each)
            for each in (many, many + 1)
        )
        return one_s - many * (two_s - one_s), two_s - one_s

    def most(depth: int, time_s: float) -> int:
        first_s, period_s = line(depth)
        return max(0, math.floor((time_s - first_s) / period_s + 1e-9))

    return EstimatedMixes(list(cuts), most, world.times.micro_batches), cuts


def _cut_that_fits(world: World, cut: Cut) -> Cut | None:
    """The cut, if it fits without recomputation, which neither planner has."""
    share = max(1, world.times.micro_batches * cut.depth // len(world.workers))
    return None if world.pipelines.run(PipelineClass(cut), share) is None else cut


def _stage_times(world: World, cut: Cut) -> tuple[list[float], list[float]]:
    layers = world.costs.workload.layers
    overhead_s = world.costs.workload.operation_overhead_s

    def total(stage: LayerRange, seconds: Callable[[int], float]) -> float:
        return overhead_s + math.fsum(map(seconds, stage))

    forward_s = [total(stage, lambda layer: layers[layer].forward_s) for stage in cut.stages]
    return forward_s, [total(stage, lambda layer: layers[layer].backward_s) for stage in cut.stages]


def _rerouted_s(world: World, fleet: Fleet) -> float:
    """The paper's estimate of the fleet with its gaps; infinite if those are in pipelines of several cuts.

    Nothing is reported of unequal pipelines.
    """
    cuts = {pipeline.cut for pipeline in fleet.pipelines}
    if len(cuts) > 1 and fleet.has_gaps:
        return math.inf
    slowest_s = 0.0
    workers = sum(len(pipeline.workers) for pipeline in fleet.pipelines)
    for cut in cuts:
        failures = Counter(
            stage for pipeline in fleet.pipelines for stage, worker in enumerate(pipeline.workers) if worker is None
        )
        if max(failures.values(), default=0) >= len(fleet.pipelines):
            return math.inf
        forward_s, backward_s = _stage_times(world, cut)
        estimate_s = reported.rerouted_step_s(
            stages=cut.depth,
            micro_batches=math.ceil(world.times.micro_batches * cut.depth / workers),
            pipelines=len(fleet.pipelines),
            failures=[failures[stage] for stage in range(cut.depth)],
            forward_s=max(forward_s),
            backward_s=max(backward_s),
        )
        slowest_s = max(slowest_s, estimate_s)
    return slowest_s
