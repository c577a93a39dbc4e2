"""Which pipelines to make of so many equal workers: the fastest of the few most promising depths."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.simulate.by_class.pipeline_classes import PipelineClass
from chameleon_ft.simulate.by_class.step_times import StepTimes

__all__ = ["Mix", "Mixes"]

# Depths with bounds above the best step by this are not looked at; of the others, the best so many are mixed.
_NEAR: Final = 1.06
_DEPTHS: Final = 8
# Of mixes, so many of the least time when shares need not be whole are timed.
_MIXES: Final = 24


@dataclass(frozen=True, slots=True)
class Mix:
    """How many pipelines of each class, and seconds of their step."""

    counts: Mapping[PipelineClass, int]
    step_s: float


class Mixes:
    """The fastest mixes that are found, by number of workers; all workers have speed 1.

    Pipelines of one depth, or of two: with unlimited numbers of both, fewer of the second than the first has stages
    are enough, for so many of the second can be replaced by whole numbers of the first.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._pipelines = times.pipelines
        self._found: dict[tuple[int, int], Mix | None] = {}
        self._equal: dict[int, Mix | None] = {}
        self._classes: dict[tuple[int, int], PipelineClass | None] = {}

    def fastest(self, workers: int, *, below_s: float = math.inf, copies: int = 1) -> Mix | None:
        """Return the fastest mix of at most so many workers; None if none fits the memory, or is faster than `below_s`.

        With `copies`, pipelines are so short that as many of them are possible: every layer has as many holders.
        """
        if below_s < math.inf:
            return self._searched(workers, below_s, copies)
        if (workers, copies) not in self._found:
            self._found[workers, copies] = self._searched(workers, below_s, copies)
        return self._found[workers, copies]

    def equal_pipelines(self, workers: int) -> Mix | None:
        """The fastest of one depth, with shares that differ by one at most; None if none fits."""
        if workers not in self._equal:
            single = self._single(workers, math.inf, 1).values()
            self._equal[workers] = min(single, key=lambda mix: mix.step_s, default=None)
        return self._equal[workers]

    def equal_within(self, workers: int, most_depth: int) -> Mix | None:
        """The same of pipelines that are not deeper than that."""
        depths = (depth for depth in self._depths(workers) if depth <= most_depth)
        mixes = (self._of_one_depth(workers, depth) for depth in depths)
        return min((mix for mix in mixes if mix is not None), key=lambda mix: mix.step_s, default=None)

    def _depths(self, workers: int, copies: int = 1) -> range:
        return range(1, min(workers // copies, self._pipelines.num_layers) + 1)

    def _class(self, depth: int, share: int) -> PipelineClass | None:
        """The cut of this depth that fits and has the least bound; None if none fits."""
        key = depth, share
        if key not in self._classes:
            classes = (self._pipelines.fitting(PipelineClass(cut), share) for cut in self._pipelines.cuts(depth))
            fitting = [own for own in classes if own is not None]
            self._classes[key] = min(fitting, key=lambda own: self._pipelines.bound_s(own, share), default=None)
        return self._classes[key]

    def _share(self, depth: int, workers: int) -> int:
        return math.ceil(self._times.micro_batches / max(1, workers // depth))

    def _of_one_depth(self, workers: int, depth: int) -> Mix | None:
        count = min(workers // depth, self._times.micro_batches)
        own = self._class(depth, self._share(depth, workers)) if count else None
        step = None if own is None else self._times.equally_shared(own, count)
        return None if own is None or step is None else Mix(FrozenMap({own: count}), step.step_s)

    def _searched(self, workers: int, below_s: float, copies: int) -> Mix | None:
        single = self._single(workers, below_s, copies)
        if not single:
            return None
        best = min(single.values(), key=lambda mix: mix.step_s)
        every = {depth: next(iter(mix.counts)) for depth, mix in single.items()}
        few = heapq.nsmallest(_DEPTHS, every, key=lambda depth: (self._divided_s(workers, depth, every[depth]), depth))
        classes = {depth: every[depth] for depth in few}
        for counts in self._promising(workers, classes):
            step = self._times.step(counts)
            if step is not None and step.step_s < best.step_s:
                best = Mix(FrozenMap({own: counts[own] for own in step.most}), step.step_s)
        return best

    def _divided_s(self, workers: int, depth: int, own: PipelineClass) -> float:
        """Seconds of a step if workers were divided into pipelines of this depth and a part of one.

        Pipelines of which many workers would be left over may be the best together with others.
        """
        line = self._pipelines.line(own, self._share(depth, workers))
        return math.inf if line is None else line[0] + line[1] * self._times.micro_batches * depth / workers

    def _single(self, workers: int, below_s: float, copies: int) -> dict[int, Mix]:
        """By depth, pipelines of one depth; those that their bounds rule out are left out."""
        found: dict[int, Mix] = {}
        best_s = math.inf
        bounds: list[tuple[float, int]] = []
        for depth in self._depths(workers, copies):
            own = PipelineClass(self._pipelines.even_cut(depth))
            share = self._times.micro_batches * depth // workers
            bounds.append((self._pipelines.bound_s(own, max(1, share)) + self._least_sync_s(own), depth))
        for bound_s, depth in sorted(bounds):
            if bound_s > min(best_s * _NEAR, below_s):
                break
            mix = self._of_one_depth(workers, depth)
            if mix is not None:
                found[depth] = mix
                best_s = min(best_s, mix.step_s)
        return found

    def _least_sync_s(self, own: PipelineClass) -> float:
        """Of the largest stage, without latency; a ring of two passes on the bytes once, of many twice."""
        layers = self._pipelines.costs.workload.layers
        largest = max(sum(layers[each].gradient_bytes for each in stage) for stage in own.cut.stages)
        return largest / self._pipelines.costs.cluster.inter_host.bytes_per_s

    def _promising(self, workers: int, classes: Mapping[int, PipelineClass]) -> list[Counter[PipelineClass]]:
        """Mixes of one or two depths, by what they take if shares need not be whole."""
        lines = {
            depth: line
            for depth, own in classes.items()
            if (line := self._pipelines.line(own, self._share(depth, workers))) is not None
        }
        found: list[tuple[float, int, int, int, int]] = []
        for first, (first_s, period_s) in lines.items():
            for second, (other_s, other_period_s) in lines.items():
                others = range(1, min(first, workers // second + 1)) if second != first else range(1)
                for number in others:
                    count = (workers - number * second) // first
                    rate = count / period_s + number / other_period_s
                    begun = count * first_s / period_s + number * other_s / other_period_s
                    if rate:
                        time_s = (self._times.micro_batches + begun) / rate
                        found.append((time_s, first, second, count, number))
        mixes: list[Counter[PipelineClass]] = []
        for _, first, second, count, number in heapq.nsmallest(_MIXES, found):
            mixes.append(Counter({classes[first]: count}) + Counter({classes[second]: number}))
        return mixes
