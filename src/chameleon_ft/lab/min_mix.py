"""Pipeline depths and shares of the micro-batches, by the estimate of a published planner."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from chameleon_ft.quantities import SUM_ROUNDING

_FOREVER_S: Final = 1e300
# Among mixes of equal estimate, the fewest pipelines reduce least, and the most send the fewest messages.
_FROM_EACH_END: Final = 2


@dataclass(frozen=True, slots=True)
class Mix:
    """Pipelines by (depth, micro-batches), and seconds of a step by the planner's estimate."""

    pipelines: tuple[tuple[int, int], ...]
    time_s: float


@dataclass(frozen=True, kw_only=True)
class LeastMix:
    """The mixes of least time: depths add up to `workers`, and shares to `micro_batches`.

    The time of a mix is that of its slowest pipeline plus `sync_s` of the number of pipelines. A knapsack decides
    whether a mix meets a given time, and bisection finds the least such time. Exact if `sync_s` does not fall with more
    pipelines, nor the time of a pipeline with more micro-batches. Unlike in `mixes.knapsack`, a pipeline takes at least
    its `min_share`.
    """

    depths: Sequence[int]
    workers: int
    micro_batches: int
    time_s: Callable[[int, int], float]
    min_share: Callable[[int], int] = lambda _: 1
    min_pipelines: int = 1
    sync_s: Callable[[int], float] = lambda _: 0.0

    @cached_property
    def _min_shares(self) -> dict[int, int]:
        """The least share of each depth."""
        return {depth: max(1, self.min_share(depth)) for depth in self.depths}

    def mixes(self) -> list[Mix]:
        """Return mixes of least time with different numbers of pipelines, the two fewest and the two most.

        Empty if there is no mix.
        """
        largest = {depth: self._most(depth, _FOREVER_S) for depth in self.depths}
        longest_s = max(
            (self.time_s(depth, share) for depth, share in largest.items() if share >= self._min_shares[depth]),
            default=0.0,
        )
        pipelines_s = self._min_s(0.0, longest_s, self.min_pipelines, or_more=True)
        if pipelines_s == math.inf:
            return []
        most = min(self.workers, self.micro_batches)
        table = self._table(pipelines_s, most)
        numbers = [n for n in range(self.min_pipelines, most + 1) if self._is_whole(table[n])]
        found = [self._mix(table, number, pipelines_s) for number in numbers]
        min_s = min(mix.time_s for mix in found)
        # Fewer pipelines take longer, but may gain as much in gradient sync. One table rules out most numbers.
        fewer = range(self.min_pipelines, numbers[0])
        table = self._table(min_s - self.sync_s(fewer[0]), fewer[-1]) if fewer else []
        for number in reversed(fewer):
            if self._is_whole(table[number]):
                own_s = self._min_s(pipelines_s, min_s - self.sync_s(number), number)
                if own_s < math.inf:
                    found.append(self._mix(self._table(own_s, number), number, own_s))
                    min_s = min(min_s, found[-1].time_s)
        fastest = [mix for mix in found if mix.time_s <= min_s * (1 + SUM_ROUNDING)]
        fastest.sort(key=lambda mix: len(mix.pipelines))
        return [mix for place, mix in enumerate(fastest) if min(place, len(fastest) - 1 - place) < _FROM_EACH_END]

    def _min_s(self, low_s: float, high_s: float, pipelines: int, *, or_more: bool = False) -> float:
        """Return the least time up to `high_s` that a mix of so many pipelines meets; infinite if none does."""

        def reached(time_s: float) -> bool:
            return self._is_whole(self._table(time_s, pipelines, or_more=or_more)[-1])

        if high_s <= low_s or not reached(high_s):
            return math.inf
        while high_s - low_s > SUM_ROUNDING * high_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if reached(middle_s) else (middle_s, high_s)
        return high_s

    def _most(self, depth: int, time_s: float) -> int:
        """Return the most micro-batches of a pipeline within `time_s`, or one less than its least share."""
        shares = range(self._min_shares[depth], self.micro_batches + 1)
        return shares.start - 1 + bisect_right(shares, time_s, key=lambda share: self.time_s(depth, share))

    def _is_whole(self, row: Sequence[int]) -> bool:
        """Return whether a row of the table places all micro-batches on all workers."""
        return bool(row[self.workers] >> self.micro_batches & 1)

    def _table(self, time_s: float, pipelines: int, *, or_more: bool = False) -> list[list[int]]:
        """Return the feasible numbers of micro-batches, as bits, by number of pipelines and of workers.

        With `or_more` the last row is for that many pipelines or more.
        """
        ranges = {depth: (low, self._most(depth, time_s)) for depth, low in self._min_shares.items()}
        able = {depth: own for depth, own in ranges.items() if own[1] >= own[0]}
        everything = (1 << self.micro_batches + 1) - 1
        table = [[1] + [0] * self.workers]
        for number in range(1, pipelines + 1):
            row = [0] * (self.workers + 1)
            for workers in range(1, self.workers + 1):
                for depth, (low, high) in able.items():
                    if depth <= workers:
                        before = table[-1][workers - depth]
                        if or_more and number == pipelines:
                            before |= row[workers - depth]
                        if before:
                            row[workers] |= _shifted(before, low, high) & everything
            table.append(row)
        return table

    def _mix(self, table: Sequence[Sequence[int]], pipelines: int, time_s: float) -> Mix:
        """Trace a mix of so many pipelines within `time_s` back through the table."""
        workers, left = self.workers, self.micro_batches
        depths: list[int] = []
        for number in reversed(range(pipelines)):
            depth, share = next(
                (depth, share)
                for depth, low in self._min_shares.items()
                if depth <= workers
                for share in range(low, min(left, self._most(depth, time_s)) + 1)
                if table[number][workers - depth] >> left - share & 1
            )
            depths.append(depth)
            workers, left = workers - depth, left - share
        least = self._min_shares.__getitem__
        return shared_out(
            sorted(depths, reverse=True), self.micro_batches, self.time_s, min_share=least, sync_s=self.sync_s
        )


def shared_out(
    depths: Sequence[int],
    micro_batches: int,
    time_s: Callable[[int, int], float],
    *,
    min_share: Callable[[int], int] = lambda _: 1,
    sync_s: Callable[[int], float] = lambda _: 0.0,
) -> Mix:
    """Return pipelines of these depths, with shares of the micro-batches that let the slowest end earliest.

    The micro-batches left after the least shares go, one by one, to the pipeline that ends earliest with one more.
    """
    shares = [min_share(depth) for depth in depths]
    for _ in range(micro_batches - sum(shares)):
        index = min(range(len(depths)), key=lambda index: time_s(depths[index], shares[index] + 1))
        shares[index] += 1
    return Mix(tuple(zip(depths, shares, strict=True)), max(map(time_s, depths, shares)) + sync_s(len(depths)))


def _shifted(bits: int, low: int, high: int) -> int:
    """Return the union of `bits` shifted left by each number from `low` to `high`."""
    found, width, wanted = bits, 1, high - low + 1
    while width < wanted:
        step = min(width, wanted - width)
        found |= found << step
        width += step
    return found << low
