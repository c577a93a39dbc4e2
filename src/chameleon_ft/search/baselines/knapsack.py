"""Depths that use up the workers, and shares of the micro-batches, by the estimate of a published planner."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["LeastMix", "Mix", "shared_out"]

# Sums were rounded in another order.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Mix:
    """Pipelines by (depth, micro-batches), and seconds of a step by the planner's estimate."""

    pipelines: tuple[tuple[int, int], ...]
    time_s: float


class LeastMix:
    """Depths that add up to `workers`, and shares that add up to `micro_batches`, of least time.

    The time of a mix is that of its slowest pipeline, and `sync_s` of the number of pipelines on top. Exact if `sync_s`
    does not fall with more pipelines, nor the time of a pipeline with more micro-batches: the least time at which there
    is a mix is one of those of a single pipeline, and whether there is one at a given time is a knapsack.
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
        sync_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self._workers = workers
        self._micro_batches = micro_batches
        self._time_s = time_s
        self._shares = {depth: max(1, least_share(depth)) for depth in depths}
        self._least_pipelines = least_pipelines
        self._sync_s = sync_s

    def mixes(self) -> list[Mix]:
        """One for every number of pipelines with which the least time can be had, the fewest first; none if there is no
        mix at all.
        """
        pipelines_s = self._least_s()
        if pipelines_s == math.inf:
            return []
        found = self._at(pipelines_s)
        least_s = min(mix.time_s for mix in found)
        for mix in self._of_fewer(len(found[0].pipelines), pipelines_s, least_s):
            found.append(mix)
            least_s = min(least_s, mix.time_s)
        fastest = [mix for mix in found if mix.time_s <= least_s * (1 + _ROUNDING)]
        return sorted(fastest, key=lambda mix: len(mix.pipelines))

    def _of_fewer(self, below: int, pipelines_s: float, least_s: float) -> Iterator[Mix]:
        """Mixes of fewer pipelines, each of them slower, which gain as much in gradient sync.

        That of more pipelines takes longer.
        """
        numbers = range(self._least_pipelines, below)
        if not numbers:
            return
        # By the latest time at which any of them gains something, which most do not reach.
        table = self._table(least_s - self._sync_s(numbers[0]), numbers[-1], or_more=False)
        for number in reversed(numbers):
            spare_s = least_s - self._sync_s(number)
            if spare_s <= pipelines_s or not self._is_whole(table[number]):
                continue
            # The times that a pipeline may take: only at these there may be a mix that was none before.
            times = sorted(
                {
                    self._time_s(depth, share)
                    for depth in self._shares
                    for share in range(self._most(depth, pipelines_s) + 1, self._most(depth, spare_s) + 1)
                }
            )
            index = bisect_left(times, True, key=lambda time_s: self._reached(time_s, number, or_more=False))
            if index < len(times):
                yield self._mix(self._table(times[index], number, or_more=False), number, times[index])

    def _least_s(self) -> float:
        """The least time of the slowest pipeline; infinite if there is no mix."""
        least_s = math.inf
        for depth in sorted(self._shares, reverse=True):
            least_s = min(least_s, self._least_bounded_by_s(depth, least_s))
        return least_s

    def _least_bounded_by_s(self, depth: int, below_s: float) -> float:
        """The least time below `below_s` at which there is a mix and that a pipeline of this depth takes."""
        low, high = self._shares[depth] - 1, self._most(depth, below_s, strictly=True)
        if high <= low or not self._reached(self._time_s(depth, high)):
            return math.inf
        shares = range(low + 1, high)
        index = bisect_left(shares, True, key=lambda share: self._reached(self._time_s(depth, share)))
        return self._time_s(depth, low + 1 + index)

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

    def _reached(self, time_s: float, pipelines: int | None = None, *, or_more: bool = True) -> bool:
        """Whether there is a mix that ends by then, with so many pipelines, or enough."""
        number = self._least_pipelines if pipelines is None else pipelines
        return self._is_whole(self._table(time_s, number, or_more=or_more)[-1])

    def _is_whole(self, row: list[int]) -> bool:
        """Whether a row of the table has all micro-batches on all workers."""
        return bool(row[self._workers] >> self._micro_batches & 1)

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
        return [
            self._mix(table, number, time_s)
            for number in range(self._least_pipelines, most + 1)
            if self._is_whole(table[number])
        ]

    def _mix(self, table: list[list[int]], pipelines: int, time_s: float) -> Mix:
        """So many pipelines that end by then, back through the table."""
        depths = self._depths(table, pipelines, time_s)
        shares = shared_out(depths, self._micro_batches, self._time_s, least_share=self._shares.__getitem__)
        slowest_s = max(map(self._time_s, depths, shares))
        return Mix(tuple(zip(depths, shares, strict=True)), slowest_s + self._sync_s(pipelines))

    def _depths(self, table: list[list[int]], pipelines: int, time_s: float) -> list[int]:
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


def shared_out(
    depths: Sequence[int],
    micro_batches: int,
    time_s: Callable[[int, int], float],
    *,
    least_share: Callable[[int], int] = lambda _: 1,
) -> list[int]:
    """Micro-batches of pipelines of these depths so that the slowest ends as early as can be.

    The micro-batches left after the least shares go, one by one, to the pipeline that ends earliest with one more.
    """
    shares = [least_share(depth) for depth in depths]
    for _ in range(micro_batches - sum(shares)):
        index = min(range(len(depths)), key=lambda index: time_s(depths[index], shares[index] + 1))
        shares[index] += 1
    return shares


def _shifted(bits: int, low: int, high: int) -> int:
    """All of `bits` shifted left by any number from `low` to `high`."""
    found, width, wanted = bits, 1, high - low + 1
    while width < wanted:
        step = min(width, wanted - width)
        found |= found << step
        width += step
    return found << low
