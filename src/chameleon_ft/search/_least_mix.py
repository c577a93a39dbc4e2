"""Depths that use up the workers, and shares of the micro-batches, by the estimate of a published planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mix:
    """Pipelines by (depth, micro-batches), and the time of the slowest by the planner's estimate."""

    pipelines: tuple[tuple[int, int], ...]
    time_s: float


class LeastMix:
    """Depths that add up to `workers`, and shares that add up to `micro_batches`, so that the slowest ends earliest.

    Exact, for times that do not fall when there are more micro-batches: the least time at which there is a mix is one
    of those of a single pipeline, and whether there is one at a given time is a knapsack.
    """

    def __init__(
        self,
        depths: Sequence[int],
        *,
        workers: int,
        micro_batches: int,
        time_s: Callable[[int, int], float],
        least_share: Callable[[int], int],
        least_pipelines: int = 1,
    ) -> None:
        self._workers = workers
        self._micro_batches = micro_batches
        self._time_s = time_s
        self._shares = {depth: max(1, least_share(depth)) for depth in depths}
        self._least_pipelines = least_pipelines

    def mixes(self) -> list[Mix]:
        """One for every number of pipelines with which the least time can be had, the fewest first; none if there is no
        mix at all.
        """
        least_s = math.inf
        for depth in sorted(self._shares, reverse=True):
            least_s = min(least_s, self._least_bounded_by_s(depth, least_s))
        return [] if least_s == math.inf else self._at(least_s)

    def _least_bounded_by_s(self, depth: int, below_s: float) -> float:
        """The least time below `below_s` at which there is a mix and that a pipeline of this depth takes."""
        low, high = self._shares[depth] - 1, self._most(depth, below_s, strictly=True)
        if high <= low or not self._reached(self._time_s(depth, high)):
            return math.inf
        while high - low > 1:
            middle = (low + high) // 2
            if self._reached(self._time_s(depth, middle)):
                high = middle
            else:
                low = middle
        return self._time_s(depth, high)

    def _most(self, depth: int, time_s: float, *, strictly: bool = False) -> int:
        """The most micro-batches by then, or one less than the least share."""
        low, high = self._shares[depth] - 1, self._micro_batches + 1
        stride = 1
        while low + 1 < high:
            # Most depths cannot do much more than their share.
            middle = min(low + stride, (low + high) // 2)
            own_s = self._time_s(depth, middle)
            if own_s < time_s or (own_s == time_s and not strictly and own_s < math.inf):
                low, stride = middle, 2 * stride
            else:
                high = middle
        return low

    def _reached(self, time_s: float) -> bool:
        """Whether there is a mix that ends by then, with enough pipelines."""
        last = self._table(time_s, self._least_pipelines, or_more=True)[-1]
        return bool(last[self._workers] >> self._micro_batches & 1)

    def _table(self, time_s: float, pipelines: int, *, or_more: bool) -> list[list[int]]:
        """Which numbers of micro-batches (bits) can be done by then, by number of pipelines and of workers.

        With `or_more` the last row is for that many pipelines or more.
        """
        ranges = {depth: (share, self._most(depth, time_s)) for depth, share in self._shares.items()}
        able = {depth: (low, high) for depth, (low, high) in ranges.items() if high >= low}
        everything = (1 << self._micro_batches + 1) - 1
        table = [[1] + [0] * self._workers]
        for number in range(1, pipelines + 1):
            row = [0] * (self._workers + 1)
            for workers in range(1, self._workers + 1):
                for depth, (low, high) in able.items():
                    if depth > workers:
                        continue
                    before = table[-1][workers - depth]
                    if or_more and number == pipelines:
                        before |= row[workers - depth]
                    if before:
                        row[workers] |= _shifted(before, low, high) & everything
            table.append(row)
        return table

    def _at(self, time_s: float) -> list[Mix]:
        most = min(self._workers, self._micro_batches)
        table = self._table(time_s, most, or_more=False)
        found: list[Mix] = []
        for number in range(self._least_pipelines, most + 1):
            if table[number][self._workers] >> self._micro_batches & 1:
                shared = self._shared_out(self._depths(table, number, time_s))
                found.append(Mix(tuple(shared), max(self._time_s(*each) for each in shared)))
        return found

    def _depths(self, table: list[list[int]], pipelines: int, time_s: float) -> list[int]:
        """Back through the table."""
        workers, left = self._workers, self._micro_batches
        found: list[int] = []
        for number in reversed(range(pipelines)):
            depth, share = next(
                (depth, share)
                for depth, low in self._shares.items()
                if depth <= workers
                for share in range(low, min(left, self._most(depth, time_s)) + 1)
                if table[number][workers - depth] >> left - share & 1
            )
            found.append(depth)
            workers, left = workers - depth, left - share
        return sorted(found, reverse=True)

    def _shared_out(self, depths: Sequence[int]) -> list[tuple[int, int]]:
        """What is left over the least shares goes, one by one, to whoever ends earliest with one more."""
        shares = [self._shares[depth] for depth in depths]
        for _ in range(self._micro_batches - sum(shares)):
            index = min(range(len(depths)), key=lambda index: self._time_s(depths[index], shares[index] + 1))
            shares[index] += 1
        return list(zip(depths, shares, strict=True))


def _shifted(bits: int, low: int, high: int) -> int:
    """All of `bits` shifted left by any number from `low` to `high`."""
    found, width, wanted = bits, 1, high - low + 1
    while width < wanted:
        step = min(width, wanted - width)
        found |= found << step
        width += step
    return found << low
