"""Seconds of a step of many pipelines, and the fastest pipelines for a number of equal workers.

A step takes shares of the micro-batches, the slowest pipeline, and gradient sync. Mixes are searched among the few most
promising depths.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from chameleon_ft.cost.step import reduction_times
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import SUM_ROUNDING
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, PipelineClass, Pipelines
from chameleon_ft.sync import Segment, SyncRounds, gradient_rounds


@dataclass(frozen=True, slots=True)
class ClassStep:
    """A step of pipelines that are counted by class.

    Attributes:
        step_s: seconds until all operations have ended and all gradients are reduced.
        program_s: seconds until all operations have ended.
        most: the most micro-batches that a pipeline of each class gets.
    """

    step_s: float
    program_s: float
    most: Mapping[PipelineClass, int]


class StepTimes:
    """Steps by the number of pipelines of each class."""

    def __init__(self, pipelines: Pipelines) -> None:
        self.pipelines = pipelines
        self.micro_batches = pipelines.costs.workload.micro_batches
        self._step = cache(self._shared)
        self._rounds = cache(self._gradient_rounds)

    def step(self, counts: Mapping[PipelineClass, int]) -> ClassStep | None:
        """Return the step with the shares for which the last pipeline ends first; None if they cannot hold all.

        Args:
            counts: number of pipelines of each class.
        """
        return self._step(tuple(sorted((own, count) for own, count in counts.items() if count)))

    def equally_shared(self, own: PipelineClass, count: int) -> ClassStep | None:
        """Return the step of equal pipelines with shares that differ by one at most."""
        most = math.ceil(self.micro_batches / count)
        if self.pipelines.run(own, most) is None:
            return None
        return self._timed({own: count}, {own: most})

    def _shared(self, classes: tuple[tuple[PipelineClass, int], ...]) -> ClassStep | None:
        counts = dict(classes)
        workers = sum(own.cut.depth * count for own, count in classes)
        lines: dict[PipelineClass, tuple[float, float]] = {}
        for own in counts:
            share = max(1, self.micro_batches * own.cut.depth // workers)
            if (line := self.pipelines.line(own, share)) is not None:
                lines[own] = line
        if not lines:
            return None
        # First with fractional shares, then whole ones: more until they are enough, fewer as long as they are.
        rate = math.fsum(counts[own] / period_s for own, (_, period_s) in lines.items())
        begun = math.fsum(counts[own] * first_s / period_s for own, (first_s, period_s) in lines.items())
        time_s = (self.micro_batches + begun) / rate
        most = {own: self._most(own, time_s, *line) for own, line in lines.items()}
        held = sum(counts[own] * most[own] for own in lines)
        while held < self.micro_batches:
            nexts = {own: self.pipelines.program_s(own, most[own] + 1) for own in lines}
            time_s = min(nexts.values())
            if time_s == math.inf:
                return None
            for own, next_s in nexts.items():
                if next_s <= time_s * (1 + SUM_ROUNDING):
                    most[own] += 1
                    held += counts[own]
        while True:
            ends_s = {own: self.pipelines.program_s(own, share) for own, share in most.items() if share}
            last_s = max(ends_s.values())
            last = [own for own, end_s in ends_s.items() if end_s >= last_s * (1 - SUM_ROUNDING)]
            held -= sum(counts[own] for own in last)
            if held < self.micro_batches:
                return self._timed(counts, {own: share for own, share in most.items() if share})
            for own in last:
                most[own] -= 1

    def _most(self, own: PipelineClass, time_s: float, first_s: float, period_s: float) -> int:
        """Return the most micro-batches that a pipeline finishes by a time; its line gives the first guess."""
        share = max(0, math.floor((time_s - first_s) / period_s))
        while share and self.pipelines.program_s(own, share) > time_s * (1 + SUM_ROUNDING):
            share -= 1
        while self.pipelines.program_s(own, share + 1) <= time_s * (1 + SUM_ROUNDING):
            share += 1
        return share

    def _timed(self, counts: Mapping[PipelineClass, int], most: Mapping[PipelineClass, int]) -> ClassStep:
        program_s = max(self.pipelines.program_s(own, share) for own, share in most.items())
        step_s = self._synced_s({own: counts[own] for own in most}, most, program_s)
        return ClassStep(step_s, program_s, FrozenMap(most))

    def _synced_s(
        self, counts: Mapping[PipelineClass, int], most: Mapping[PipelineClass, int], program_s: float
    ) -> float:
        """Return seconds until all gradients are reduced, in rounds after the operations, as `estimate_sync` does.

        Pipelines of a class do everything at the same time, so two stand for all; a ring goes through all of them.
        """
        total = sum(counts.values())
        costs = self.pipelines.costs
        layers, cluster = costs.workload.layers, costs.cluster
        if total < 2 or not any(layer.gradient_bytes for layer in layers):
            return program_s
        # Stages are counted through the pipelines.
        free_s: dict[int, float] = {}
        classes = sorted(counts)
        for own in classes:
            run = self.pipelines.run(own, most[own])
            assert run is not None
            free_s.update(enumerate(run.ends_s * min(2, counts[own]), start=len(free_s)))
        link = cluster.intra_host if len(cluster.host_sizes) == 1 else cluster.inter_host
        rounds = self._rounds(tuple((own.cut.cut_points, min(2, counts[own])) for own in classes))

        def ring_s(segment: Segment) -> float:
            return link.ring_all_reduce_s(sum(layers[each].gradient_bytes for each in segment.layers), total)

        reductions = ((segment.holders, 0.0, ring_s(segment)) for segment in rounds.order)
        return max((program_s, *(end_s for _, end_s in reduction_times(reductions, free_s))))

    def _gradient_rounds(self, classes: tuple[tuple[tuple[int, ...], int], ...]) -> SyncRounds:
        """Return the rounds of pipelines by (cut points, number of pipelines)."""
        stages = [stage for cut_points, count in classes for stage in Cut(cut_points).stages * count]
        placement = Placement(self.pipelines.num_layers, {number: (stage,) for number, stage in enumerate(stages)})
        return gradient_rounds(placement)


# Depths whose bounds exceed the best step by this factor are left out; at most this many others are mixed.
_NEAR: Final = 1.06
_DEPTHS: Final = 8
# Number of mixes that are timed, those of least time with fractional shares.
_MIXES: Final = 24


@dataclass(frozen=True, slots=True)
class Mix:
    """Number of pipelines of each class, and seconds of their step."""

    counts: Mapping[PipelineClass, int]
    step_s: float


class Mixes:
    """The fastest mixes by number of workers; all workers have speed 1.

    A mix has pipelines of one depth or of two. It needs fewer pipelines of the second depth than the first has stages:
    that many could be replaced by pipelines of the first.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._pipelines = times.pipelines
        self._fastest = cache(self._searched)
        self.equal_pipelines = cache(self._equal_pipelines)
        self._class = cache(self._fitting_class)

    def fastest(self, workers: int, *, copies: int = 1) -> Mix | None:
        """Return the fastest mix on up to this many workers; None if none fits the memory.

        Pipelines are short enough to run `copies` side by side, so every layer has that many holders.
        """
        return self._fastest(workers, copies)

    def _searched(self, workers: int, copies: int) -> Mix | None:
        single = self._single(workers, copies)
        best = _best(single.values())
        if best is None:
            return None
        every = {depth: next(iter(mix.counts)) for depth, mix in single.items()}
        few = heapq.nsmallest(_DEPTHS, every, key=lambda depth: (self._divided_s(workers, depth, every[depth]), depth))
        for counts in self._promising(workers, {depth: every[depth] for depth in few}):
            step = self._times.step(counts)
            if step is not None and step.step_s < best.step_s:
                best = Mix(FrozenMap({own: counts[own] for own in step.most}), step.step_s)
        return best

    def _equal_pipelines(self, workers: int) -> Mix | None:
        """Return the fastest pipelines of one depth, with shares that differ by one at most; None if none fits."""
        return _best(self._single(workers, 1).values())

    def equal_within(self, workers: int, max_depth: int) -> Mix | None:
        """Return the fastest pipelines of one depth up to `max_depth`; None if none fits."""
        depths = range(1, min(workers, self._pipelines.num_layers, max_depth) + 1)
        mixes = (self._of_one_depth(workers, depth) for depth in depths)
        return _best(mix for mix in mixes if mix is not None)

    def _single(self, workers: int, copies: int) -> dict[int, Mix]:
        """Return pipelines of one depth, by depth, without those that their bounds rule out."""
        found: dict[int, Mix] = {}
        best_s = math.inf
        bounds: list[tuple[float, int]] = []
        for depth in range(1, min(workers // copies, self._pipelines.num_layers) + 1):
            own = PipelineClass(self._pipelines.even_cut(depth))
            share = max(1, self._times.micro_batches * depth // workers)
            bounds.append((self._pipelines.bound_s(own, share) + self._min_sync_s(own), depth))
        for bound_s, depth in sorted(bounds):
            if bound_s > best_s * _NEAR:
                break
            mix = self._of_one_depth(workers, depth)
            if mix is not None:
                found[depth] = mix
                best_s = min(best_s, mix.step_s)
        return found

    def _of_one_depth(self, workers: int, depth: int) -> Mix | None:
        count = min(workers // depth, self._times.micro_batches)
        own = self._class(depth, self._share(depth, workers)) if count else None
        step = None if own is None else self._times.equally_shared(own, count)
        return None if own is None or step is None else Mix(FrozenMap({own: count}), step.step_s)

    def _fitting_class(self, depth: int, share: int) -> PipelineClass | None:
        """Return the cut of this depth that fits and has the least bound; None if none fits."""
        classes = (self._pipelines.fitting(PipelineClass(cut), share) for cut in self._pipelines.cuts(depth))
        fitting = [own for own in classes if own is not None]
        return min(fitting, key=lambda own: self._pipelines.bound_s(own, share), default=None)

    def _share(self, depth: int, workers: int) -> int:
        return math.ceil(self._times.micro_batches / max(1, workers // depth))

    def _min_sync_s(self, own: PipelineClass) -> float:
        """Return the least sync of the largest stage: no latency, and a ring of two, which sends all bytes once."""
        layers = self._pipelines.costs.workload.layers
        largest = max(sum(layers[each].gradient_bytes for each in stage) for stage in own.cut.stages)
        return largest / self._pipelines.costs.cluster.inter_host.bytes_per_s

    def _divided_s(self, workers: int, depth: int, own: PipelineClass) -> float:
        """Return seconds of a step if a fraction of a pipeline of this depth could use the remaining workers.

        A depth that leaves many workers over may be best in a mix with another.
        """
        line = self._pipelines.line(own, self._share(depth, workers))
        return math.inf if line is None else line[0] + line[1] * self._times.micro_batches * depth / workers

    def _promising(self, workers: int, classes: Mapping[int, PipelineClass]) -> list[Counter[PipelineClass]]:
        """Return the mixes of one or two depths that are fastest with fractional shares."""
        lines = {
            depth: line
            for depth, own in classes.items()
            if (line := self._pipelines.line(own, self._share(depth, workers))) is not None
        }
        found: list[tuple[float, int, int, int, int]] = []
        for first, (first_s, period_s) in lines.items():
            for second, (other_s, other_period_s) in lines.items():
                for number in range(1, min(first, workers // second + 1)) if second != first else range(1):
                    count = (workers - number * second) // first
                    rate = count / period_s + number / other_period_s
                    begun = count * first_s / period_s + number * other_s / other_period_s
                    if rate:
                        time_s = (self._times.micro_batches + begun) / rate
                        found.append((time_s, first, second, count, number))
        return [
            Counter({classes[first]: count}) + Counter({classes[second]: number})
            for _, first, second, count, number in heapq.nsmallest(_MIXES, found)
        ]


def _best(mixes: Iterable[Mix]) -> Mix | None:
    return min(mixes, key=lambda mix: mix.step_s, default=None)
