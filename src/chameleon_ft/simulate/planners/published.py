"""Published planners by class: Oobleck's templates, and the pipelines and estimates of the Chameleon paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TypeAlias

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.estimate import paper as reported
from chameleon_ft.plan import LayerRange
from chameleon_ft.presets import Recompute
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.baselines import pipeline_templates, reconfigured_pipelines
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, LayoutPipeline, arranged
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, PipelineClass
from chameleon_ft.simulate.by_class.world import World
from chameleon_ft.simulate.planners.estimated_mixes import EstimatedMixes

__all__ = ["estimated_mix", "oobleck_mixes", "paper_mixes", "reconfigured", "rerouted_s"]

_Mixes: TypeAlias = tuple[EstimatedMixes, Mapping[int, Cut]]


def estimated_mix(planner: _Mixes, current: ClusterLayout, live: Collection[int]) -> tuple[ClusterLayout, float] | None:
    """(layout, seconds of a step by the estimate) of all live workers, or as many as there are pipelines for.

    Workers are equal to these planners, slow ones as well. None if nothing fits.
    """
    mixes, cuts = planner
    found = next((mix for left in range(len(live), 0, -1) if (mix := mixes.fastest(left)) is not None), None)
    if found is None:
        return None
    counts, estimate_s = found
    return arranged({cuts[depth]: count for depth, count in counts.items()}, sorted(live), current), estimate_s


def reconfigured(planner: _Mixes, current: ClusterLayout) -> ClusterLayout | None:
    """The pipelines of a layout with the templates of their new sizes, as Oobleck's released code makes them.

    Their workers stay together, so less moves than for the best combination. None if a pipeline has no template.
    """
    _, cuts = planner
    held = current.held()
    pipelines = reconfigured_pipelines((pipeline.live for pipeline in current.pipelines), min(cuts, default=0))
    if not pipelines or not cuts.keys() >= set(map(len, pipelines)):
        return None
    in_order = (sorted(own, key=lambda worker: held[worker].start) for own in pipelines)
    return ClusterLayout(tuple(LayoutPipeline(cuts[len(own)], tuple(own)) for own in in_order))


def oobleck_mixes(world: World, *, recompute: bool) -> _Mixes:
    """The combinations of Oobleck's templates, with or without recomputation, by T1 + T2 + T3.

    The all-reduce of the first layer, hardly another for other combinations, is left out.
    """
    cluster = world.costs.cluster
    # Templates depend on the number of workers only where these are fewer than the layers.
    few = min(len(cluster.workers), 2 * world.pipelines.num_layers)
    workers = tuple(Worker(number, "host", 1.0, world.pipelines.memory_bytes) for number in range(few))
    costs = CostModel(world.costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host))
    templates = pipeline_templates(costs, recompute=recompute, with_room=True)
    cuts = {
        nodes: cut
        for nodes, template in templates.items()
        if (cut := _cut_that_fits(world, Cut(template.cut_points, Recompute.FULL if recompute else Recompute.NONE)))
    }

    def most(nodes: int, time_s: float) -> int:
        first_s = templates[nodes].iteration_s(0)
        return max(0, math.floor((time_s - first_s) / templates[nodes].slowest_s + 1e-9))

    return EstimatedMixes(list(cuts), most, world.times.micro_batches), cuts


def paper_mixes(world: World) -> _Mixes:
    """The combinations of the paper's pipelines."""
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
    """The cut, if it fits."""
    share = max(1, world.times.micro_batches * cut.depth // len(world.workers))
    return cut if world.pipelines.fits(PipelineClass(cut), share) else None


def _stage_times(world: World, cut: Cut) -> tuple[list[float], list[float]]:
    layers = world.costs.workload.layers
    overhead_s = world.costs.workload.operation_overhead_s

    def total(stage: LayerRange, seconds: Callable[[int], float]) -> float:
        return overhead_s + math.fsum(map(seconds, stage))

    forward_s = [total(stage, lambda layer: layers[layer].forward_s) for stage in cut.stages]
    return forward_s, [total(stage, lambda layer: layers[layer].backward_s) for stage in cut.stages]


def rerouted_s(world: World, layout: ClusterLayout) -> float:
    """The paper's estimate of the layout with its gaps; infinite if those are in pipelines of several cuts.

    Nothing is reported of unequal pipelines.
    """
    cuts = {pipeline.cut for pipeline in layout.pipelines}
    if len(cuts) > 1 and layout.has_gaps:
        return math.inf
    slowest_s = 0.0
    workers = sum(len(pipeline.workers) for pipeline in layout.pipelines)
    for cut in cuts:
        failures = Counter(
            stage for pipeline in layout.pipelines for stage, worker in enumerate(pipeline.workers) if worker is None
        )
        if max(failures.values(), default=0) >= len(layout.pipelines):
            return math.inf
        forward_s, backward_s = _stage_times(world, cut)
        estimate_s = reported.rerouted_step_s(
            stages=cut.depth,
            micro_batches=math.ceil(world.times.micro_batches * cut.depth / workers),
            pipelines=len(layout.pipelines),
            failures=[failures[stage] for stage in range(cut.depth)],
            forward_s=max(forward_s),
            backward_s=max(backward_s),
        )
        slowest_s = max(slowest_s, estimate_s)
    return slowest_s
