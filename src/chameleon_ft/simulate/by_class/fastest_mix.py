"""The fastest pipelines for a number of equal workers, among the few most promising depths."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.simulate.by_class.pipeline_classes import PipelineClass
from chameleon_ft.simulate.by_class.step_times import StepTimes

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

    def equal_within(self, workers: int, most_depth: int) -> Mix | None:
        """Return the fastest pipelines of one depth up to `most_depth`; None if none fits."""
        depths = range(1, min(workers, self._pipelines.num_layers, most_depth) + 1)
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
            bounds.append((self._pipelines.bound_s(own, share) + self._least_sync_s(own), depth))
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

    def _least_sync_s(self, own: PipelineClass) -> float:
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
