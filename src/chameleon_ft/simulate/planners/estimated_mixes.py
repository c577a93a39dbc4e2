"""Pipelines that use up all workers and have the least largest estimate: the choice of published planners."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["EstimatedMixes"]

# By how much the largest estimate may be above the least there is, relatively.
_CLOSE: Final = 1e-5
_Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EstimatedMixes:
    """Mixes by number of workers.

    Attributes:
        depths: the depths that pipelines may have.
        most: how many micro-batches a pipeline of a depth finishes by a time, by its estimate.
        micro_batches: how many are to be done.
    """

    depths: Sequence[int]
    most: Callable[[int, float], int]
    micro_batches: int
    _found: dict[int, tuple[Counter[int], float] | None] = field(default_factory=dict, repr=False)

    def fastest(self, workers: int) -> tuple[Counter[int], float] | None:
        """(pipelines by depth, seconds by the estimate) for all of so many workers; None if none uses them up."""
        if workers not in self._found:
            self._found[workers] = self._searched(workers)
        return self._found[workers]

    def _searched(self, workers: int) -> tuple[Counter[int], float] | None:
        low_s, high_s = 0.0, 1.0
        if self._held(workers, math.inf)[workers] < 0:
            return None
        while self._held(workers, high_s)[workers] < self.micro_batches:
            low_s, high_s = high_s, 2 * high_s
            if high_s > 1e12:
                return None
        while high_s - low_s > _CLOSE * high_s:
            middle_s = (low_s + high_s) / 2
            if self._held(workers, middle_s)[workers] >= self.micro_batches:
                high_s = middle_s
            else:
                low_s = middle_s
        return self._traced(workers, high_s), high_s

    def _values(self, time_s: float) -> dict[int, int]:
        if time_s == math.inf:
            return dict.fromkeys(self.depths, 0)
        return {depth: min(self.most(depth, time_s), self.micro_batches) for depth in self.depths}

    def _held(self, workers: int, time_s: float) -> _Integers:
        """The most micro-batches by number of workers that are used up; negative where that cannot be.

        A pipeline that would have none to do is not made, as in both planners.
        """
        held = np.full(workers + 1, np.iinfo(np.int64).min // 2, dtype=np.int64)
        held[0] = 0
        for depth, value in self._values(time_s).items():
            if value or time_s == math.inf:
                rows = -(-len(held) // depth)
                padded = np.full(rows * depth, np.iinfo(np.int64).min // 2, dtype=np.int64)
                padded[: len(held)] = held
                table = padded.reshape(rows, depth)
                gained = value * np.arange(rows, dtype=np.int64)[:, None]
                held = (np.maximum.accumulate(table - gained, axis=0) + gained).reshape(-1)[: len(held)]
        return held

    def _traced(self, workers: int, time_s: float) -> Counter[int]:
        values = {depth: value for depth, value in self._values(time_s).items() if value}
        held = self._held(workers, time_s)
        counts: Counter[int] = Counter()
        left = workers
        while left:
            depth = next(
                each for each, value in values.items() if each <= left and held[left] == held[left - each] + value
            )
            counts[depth] += 1
            left -= depth
        return counts
