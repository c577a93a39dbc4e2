"""What a step of many pipelines takes: shares of the micro-batches, the slowest of them, and gradient sync after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.estimate import reduction_times
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import SUM_ROUNDING
from chameleon_ft.simulate.by_class.pipeline_classes import Cut, PipelineClass, Pipelines
from chameleon_ft.sync import SyncRounds, gradient_rounds

__all__ = ["ClassStep", "StepTimes"]


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
    """Steps by how many pipelines there are of each class; the same counts are looked at once."""

    def __init__(self, pipelines: Pipelines) -> None:
        self.pipelines = pipelines
        self.micro_batches = pipelines.costs.workload.micro_batches
        self._steps: dict[tuple[tuple[tuple[PipelineClass, int], ...], int], ClassStep | None] = {}
        self._rounds: dict[tuple[tuple[tuple[int, ...], bool], ...], SyncRounds] = {}

    def step(self, counts: Mapping[PipelineClass, int], *, micro_batches: int | None = None) -> ClassStep | None:
        """The step with the shares that let the last pipeline end first; None where they cannot hold all.

        Args:
            counts: how many pipelines there are of each class.
            micro_batches: how many are shared out; those of the workload if not given.
        """
        wanted = self.micro_batches if micro_batches is None else micro_batches
        key = tuple(sorted((own, count) for own, count in counts.items() if count)), wanted
        if key not in self._steps:
            self._steps[key] = self._shared(dict(key[0]), wanted)
        return self._steps[key]

    def equally_shared(self, own: PipelineClass, count: int) -> ClassStep | None:
        """The step of equal pipelines with shares that differ by one at most."""
        most = math.ceil(self.micro_batches / count)
        if self.pipelines.run(own, most) is None:
            return None
        return self._timed({own: count}, {own: most})

    def _shared(self, counts: Mapping[PipelineClass, int], wanted: int) -> ClassStep | None:
        if not counts:
            return None
        lines = {own: line for own in counts if (line := self._line(own, counts)) is not None}
        if not lines:
            return None
        rate = math.fsum(counts[own] / period_s for own, (_, period_s) in lines.items())
        begun = math.fsum(counts[own] * first_s / period_s for own, (first_s, period_s) in lines.items())
        time_s = (wanted + begun) / rate
        most = {own: self._most(own, time_s, line) for own, line in lines.items()}
        held = sum(counts[own] * most[own] for own in lines)
        while held < wanted:
            nexts = {own: self.pipelines.program_s(own, most[own] + 1) for own in lines}
            time_s = min(nexts.values())
            if time_s == math.inf:
                return None
            for own, next_s in nexts.items():
                if next_s <= time_s * (1 + SUM_ROUNDING):
                    most[own] += 1
                    held += counts[own]
        while True:
            last_s = max(self.pipelines.program_s(own, most[own]) for own in lines)
            last = [
                own
                for own in lines
                if most[own] and self.pipelines.program_s(own, most[own]) >= last_s * (1 - SUM_ROUNDING)
            ]
            fewer = held - sum(counts[own] for own in last)
            if fewer < wanted:
                break
            held = fewer
            for own in last:
                most[own] -= 1
        return self._timed(counts, {own: share for own, share in most.items() if share})

    def _line(self, own: PipelineClass, counts: Mapping[PipelineClass, int]) -> tuple[float, float] | None:
        """The line of `Pipelines.line` at its share by depth."""
        workers = sum(each.cut.depth * count for each, count in counts.items())
        share = max(1, self.micro_batches * own.cut.depth // workers)
        return self.pipelines.line(own, share)

    def _most(self, own: PipelineClass, time_s: float, line: tuple[float, float]) -> int:
        """The most micro-batches that it finishes by a time."""
        first_s, period_s = line
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
        """Until all gradients are reduced, segment by segment in rounds, after the operations, as `estimate_sync`.

        Pipelines of a class do everything at the same time, so two stand for all; a ring goes through all of them.
        """
        total = sum(counts.values())
        layers = self.pipelines.costs.workload.layers
        if total < 2 or not any(layer.gradient_bytes for layer in layers):
            return program_s
        classes = sorted(counts)
        few = [own for own in classes for _ in range(min(2, counts[own]))]
        free_s: dict[int, float] = {}
        number = 0
        for own in few:
            run = self.pipelines.run(own, most[own])
            assert run is not None
            free_s.update(enumerate(run.ends_s, start=number))
            number += own.cut.depth
        cluster = self.pipelines.costs.cluster
        one_host = len({worker.host for worker in cluster.workers}) == 1
        link = cluster.intra_host if one_host else cluster.inter_host
        gradient_bytes = [layer.gradient_bytes for layer in layers]
        segments = self._rounds_of([(own.cut.cut_points, counts[own] > 1) for own in classes]).order
        reductions = (
            (own.holders, 0.0, link.ring_all_reduce_s(sum(gradient_bytes[own.layers.start : own.layers.stop]), total))
            for own in segments
        )
        return max((program_s, *(end_s for _, end_s in reduction_times(reductions, free_s))))

    def _rounds_of(self, classes: Sequence[tuple[tuple[int, ...], bool]]) -> SyncRounds:
        key = tuple(classes)
        if key not in self._rounds:
            held = [
                layers
                for cut_points, several in classes
                for _ in range(1 + several)
                for layers in Cut(cut_points).stages
            ]
            placement = Placement(self.pipelines.num_layers, {number: (own,) for number, own in enumerate(held)})
            self._rounds[key] = gradient_rounds(placement)
        return self._rounds[key]
