"""Published planners by class: Oobleck's templates, and the pipelines and estimates of the Chameleon paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

from chameleon_ft.cluster import Worker
from chameleon_ft.cost.presets import Recompute
from chameleon_ft.lab import paper
from chameleon_ft.lab.oobleck import pipeline_templates, reconfigured_pipelines
from chameleon_ft.search.knapsack import BoundedMix, Size, best_mix
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, LayoutPipeline, arranged
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, PipelineClass, on_workers
from chameleon_ft.simulate.by_class.step_times import StepTimes
from chameleon_ft.simulate.planners.class_planner import ProposalsByClass
from chameleon_ft.simulate.planners.planner import Option

# By how much the largest estimate may be above the least there is, relatively.
_PRECISION: Final = 1e-5
# Longer than any step.
_LONGEST_S: Final = 1e12


@dataclass(frozen=True, slots=True)
class EstimatedTimes:
    """A pipeline by its estimate: `share` micro-batches take first_s + share * period_s."""

    first_s: float
    period_s: float

    def most(self, time_s: float) -> int:
        """Return the most micro-batches that the pipeline finishes by a time."""
        return max(0, math.floor((time_s - self.first_s) / self.period_s + 1e-9))


class EstimatedMixes:
    """Pipelines that use up all workers and whose largest estimate is least: the choice of published planners.

    Whether so many workers can finish all micro-batches by a given time is a knapsack; the least such time is found by
    bisection. A pipeline that would have no micro-batch is not formed, as in both planners.

    Args:
        pipelines: the estimate for each depth that pipelines may have.
        micro_batches: The micro-batches of a step.
    """

    def __init__(self, pipelines: Mapping[int, EstimatedTimes], micro_batches: int) -> None:
        self._pipelines = pipelines
        self._micro_batches = micro_batches
        self.fastest = cache(self._fastest)

    def _fastest(self, workers: int) -> tuple[Counter[int], float] | None:
        """Return (pipelines by depth, estimated seconds) for all of so many workers; None if none uses them up."""
        low_s, high_s = 0.0, 1.0
        if self._mix(_LONGEST_S, workers).bound < self._micro_batches:
            return None
        while self._mix(high_s, workers).bound < self._micro_batches:
            low_s, high_s = high_s, 2 * high_s
        while high_s - low_s > _PRECISION * high_s:
            middle_s = (low_s + high_s) / 2
            enough = self._mix(middle_s, workers).bound >= self._micro_batches
            low_s, high_s = (low_s, middle_s) if enough else (middle_s, high_s)
        return Counter({depth: count for (depth,), count in self._mix(high_s, workers).mix.items()}), high_s

    def _mix(self, time_s: float, workers: int) -> BoundedMix:
        """Return the pipelines of all workers that finish most micro-batches by a time."""
        shares: dict[Size, int] = {
            (depth,): min(own.most(time_s), self._micro_batches) for depth, own in self._pipelines.items()
        }
        return best_mix(shares, (workers,), all_workers=True)


@dataclass(frozen=True, slots=True)
class PublishedPlanner:
    """The pipelines of a published planner: the cut for each depth, and the mixes of these cuts."""

    cuts: Mapping[int, Cut]
    mixes: EstimatedMixes

    def layout(self, current: ClusterLayout, live: Collection[int]) -> tuple[ClusterLayout, float] | None:
        """Return (layout, estimated seconds of a step) of all live workers, or as many as there are pipelines for.

        Workers are equal to these planners, slow ones as well. None if nothing fits.
        """
        found = next(filter(None, map(self.mixes.fastest, range(len(live), 0, -1))), None)
        if found is None:
            return None
        counts, estimate_s = found
        return arranged({self.cuts[depth]: count for depth, count in counts.items()}, sorted(live), current), estimate_s


def reconfigured(planner: PublishedPlanner, current: ClusterLayout) -> ClusterLayout | None:
    """Return the pipelines of a layout with the templates of their new sizes, as Oobleck's released code makes them.

    Their workers stay together, so less moves than for the best combination. None if a pipeline has no template.
    """
    cuts, held = planner.cuts, current.held
    pipelines = reconfigured_pipelines((pipeline.live for pipeline in current.pipelines), min(cuts, default=0))
    if not pipelines or not cuts.keys() >= set(map(len, pipelines)):
        return None
    in_order = (sorted(own, key=lambda worker: held[worker].start) for own in pipelines)
    return ClusterLayout(tuple(LayoutPipeline(cuts[len(own)], tuple(own)) for own in in_order))


@lru_cache(maxsize=8)
def oobleck_planner(times: StepTimes, *, recompute: bool) -> PublishedPlanner:
    """Return the combinations of Oobleck's templates, with or without recomputation, by T1 + T2 + T3.

    The all-reduce of the first layer, nearly equal for all combinations, is left out.
    """
    pipelines, costs = times.pipelines, times.pipelines.costs
    # Templates depend on the number of workers only if these are fewer than the layers.
    few = min(len(costs.cluster.workers), 2 * pipelines.num_layers)
    workers = (Worker(number, "host", 1.0, pipelines.memory_bytes) for number in range(few))
    templates = pipeline_templates(on_workers(costs, workers), recompute=recompute, with_room=True)
    level = Recompute.FULL if recompute else Recompute.NONE
    cuts = _fitting(times, (Cut(template.cut_points, level) for template in templates.values()))
    estimates = {nodes: EstimatedTimes(templates[nodes].iteration_s(0), templates[nodes].slowest_s) for nodes in cuts}
    return PublishedPlanner(cuts, EstimatedMixes(estimates, times.micro_batches))


@lru_cache(maxsize=8)
def paper_planner(times: StepTimes) -> PublishedPlanner:
    """Return the combinations of the paper's pipelines."""
    pipelines = times.pipelines
    workers = len(pipelines.costs.cluster.workers)
    cuts = _fitting(times, map(pipelines.even_cut, range(1, min(workers, pipelines.num_layers) + 1)))
    estimates: dict[int, EstimatedTimes] = {}
    for depth, cut in cuts.items():
        forward_s, backward_s = _stage_times(times, cut)
        # With enough micro-batches, one more adds the period of 1F1B.
        many = max(2 * depth, times.micro_batches * depth // workers)
        one_s, two_s = (
            paper.pipeline_step_s(forward_s=forward_s, backward_s=backward_s, micro_batches=each)
            for each in (many, many + 1)
        )
        estimates[depth] = EstimatedTimes(one_s - many * (two_s - one_s), two_s - one_s)
    return PublishedPlanner(cuts, EstimatedMixes(estimates, times.micro_batches))


def _fitting(times: StepTimes, cuts: Iterable[Cut]) -> dict[int, Cut]:
    """Return the cuts that fit the memory, by depth."""
    workers = len(times.pipelines.costs.cluster.workers)
    return {
        cut.depth: cut
        for cut in cuts
        if times.pipelines.fits(PipelineClass(cut), max(1, times.micro_batches * cut.depth // workers))
    }


def _stage_times(times: StepTimes, cut: Cut) -> tuple[list[float], list[float]]:
    """Return the forward and the backward seconds of each stage."""
    workload = times.pipelines.costs.workload
    overhead_s, layers = workload.operation_overhead_s, workload.layers
    forward_s = [overhead_s + math.fsum(layers[layer].forward_s for layer in stage) for stage in cut.stages]
    return forward_s, [overhead_s + math.fsum(layers[layer].backward_s for layer in stage) for stage in cut.stages]


def rerouted_s(times: StepTimes, layout: ClusterLayout) -> float:
    """Return the paper's estimate of a layout with its gaps; infinite if these are in pipelines of several cuts.

    Nothing is reported of unequal pipelines.
    """
    cuts = {pipeline.cut for pipeline in layout.pipelines}
    failures = Counter(
        stage for pipeline in layout.pipelines for stage, worker in enumerate(pipeline.workers) if worker is None
    )
    if failures and (len(cuts) > 1 or max(failures.values()) >= len(layout.pipelines)):
        return math.inf
    workers = sum(len(pipeline.workers) for pipeline in layout.pipelines)
    slowest_s = 0.0
    for cut in cuts:
        forward_s, backward_s = _stage_times(times, cut)
        estimate_s = paper.rerouted_step_s(
            stages=cut.depth,
            micro_batches=math.ceil(times.micro_batches * cut.depth / workers),
            pipelines=len(layout.pipelines),
            failures=[failures[stage] for stage in range(cut.depth)],
            forward_s=max(forward_s),
            backward_s=max(backward_s),
        )
        slowest_s = max(slowest_s, estimate_s)
    return slowest_s


def oobleck_options(name: str, proposer: ProposalsByClass) -> list[Option[ClusterLayout]]:
    """As in runs: the best combination, and the templates of the pipelines' new sizes; recomputing, and not."""
    world, layouts = proposer.world, list[ClusterLayout]()
    for recompute in (True, False):
        planner = oobleck_planner(world.times, recompute=recompute)
        if (found := planner.layout(proposer.layout, proposer.state.speeds)) is not None:
            layouts += world.placements(found[0])
        if (smaller := reconfigured(planner, proposer.layout)) is not None:
            layouts.append(smaller)
    return proposer.options(name, *layouts)


def paper_options(name: str, proposer: ProposalsByClass) -> list[Option[ClusterLayout]]:
    """As in runs: rerouting or a full re-partition, whichever is better by the paper's estimates."""
    world = proposer.world
    found = paper_planner(world.times).layout(proposer.layout, proposer.state.speeds)
    options = [] if found is None else proposer.options(f"{name}-repartition", *world.placements(found[0]))
    step_s, transition_s = math.inf, 0.0
    if found is not None and options:
        step_s, transition_s = found[1], max(0.0, options[0].still_s - proposer.phases.total_s)
    reroutes = paper.prefers_rerouting(
        samples=world.costs.workload.samples,
        step_s=step_s,
        transition_s=transition_s,
        rerouted_s=rerouted_s(world.times, proposer.layout),
        horizon_s=proposer.state.horizon_s,
    )
    return proposer.reroute(f"{name}-reroute") if reroutes else options
