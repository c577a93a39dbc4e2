"""Pipelines that use up all workers and have the least largest estimate: the choice of published planners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from chameleon_ft.search.mixes.knapsack import BoundedMix, Size, best_mix

__all__ = ["EstimatedMixes"]

# By how much the largest estimate may be above the least there is, relatively.
_CLOSE: Final = 1e-5
# Longer than any step.
_LONGEST_S: Final = 1e12


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
        """Return (pipelines by depth, seconds by the estimate) for all of so many workers; None if none uses them up.

        The least time by which a knapsack of pipelines finishes all micro-batches is found by doubling and bisection.
        """
        if workers not in self._found:
            self._found[workers] = self._searched(workers)
        return self._found[workers]

    def _searched(self, workers: int) -> tuple[Counter[int], float] | None:
        low_s, high_s = 0.0, 1.0
        if self._by(_LONGEST_S, workers).bound < self.micro_batches:
            return None
        while self._by(high_s, workers).bound < self.micro_batches:
            low_s, high_s = high_s, 2 * high_s
        while high_s - low_s > _CLOSE * high_s:
            middle_s = (low_s + high_s) / 2
            if self._by(middle_s, workers).bound >= self.micro_batches:
                high_s = middle_s
            else:
                low_s = middle_s
        return Counter({depth: count for (depth,), count in self._by(high_s, workers).mix.items()}), high_s

    def _by(self, time_s: float, workers: int) -> BoundedMix:
        """Return the pipelines of all workers that finish most micro-batches by a time.

        A pipeline that would have none to do is not made, as in both planners.
        """
        values: dict[Size, int] = {(depth,): min(self.most(depth, time_s), self.micro_batches) for depth in self.depths}
        return best_mix(values, (workers,), all_workers=True)
