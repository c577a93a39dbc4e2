"""Seconds of a step of many pipelines: shares of the micro-batches, the slowest pipeline, and gradient sync."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from chameleon_ft.estimate import reduction_times
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
        free_s: dict[int, float] = {}  # by stage, counted through the pipelines
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
