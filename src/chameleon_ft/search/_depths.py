"""What pipelines of about equal depth promise, where gradients are to be reduced."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import SyncCost
from chameleon_ft.search._effort import is_dear
from chameleon_ft.search._sync import LeastSync, about
from chameleon_ft.search._timed import Timer

# So many depths are tried out.
_FEW: Final = 4


@dataclass(frozen=True, slots=True)
class Depth:
    """Pipelines of about equal depth.

    Attributes:
        depth: of most of them.
        numbers: how many there are of them, at least and at most.
        micro_batches: of each, on the average.
        sync: what that counts for gradient sync.
        timer: schedules them.
    """

    depth: int
    numbers: tuple[int, int]
    micro_batches: float
    sync: SyncCost
    timer: Timer

    @property
    def formula_s(self) -> float:
        """No more than `time_s`, and made in no time."""
        return self.timer.mean_formula_s(self.depth, self.micro_batches, self.sync)

    @property
    def time_s(self) -> float:
        """The least that they take if all are equal; infinite where they do not fit."""
        return self.timer.mean_bound_s(self.depth, self.micro_batches, self.sync)


def depths(costs: CostModel, timers: Iterable[Timer], likely_s: float) -> list[Depth]:
    """Those at which nobody goes without a micro-batch; steps that take longer than `likely_s` are not thought of."""
    cluster, micro_batches = costs.cluster, costs.workload.micro_batches
    workers = len(cluster.workers)
    least = LeastSync(costs, likely_s)
    found: list[Depth] = []
    for timer in timers:
        for depth in range(1, min(workers, timer.pipelines.num_layers) + 1):
            fewest = workers // depth
            if fewest <= micro_batches:
                share, numbers = micro_batches * depth / workers, (fewest, min(-(-workers // depth), micro_batches))
                found.append(Depth(depth, numbers, share, least.of(about(fewest, cluster)), timer))
    return found


def of_least_time(possible: Iterable[Depth], count: int) -> list[tuple[float, Depth]]:
    """(time, depth) of those of least time, the least first, and that is finite.

    Of depths that go with the same numbers of pipelines, one stands for all.
    """
    best: dict[tuple[tuple[int, int], bool], tuple[float, Depth]] = {}
    for formula_s, each in sorted(((each.formula_s, each) for each in possible), key=_by_time):
        # None that follows takes less than its formula says.
        if sum(time_s <= formula_s for time_s, _ in best.values()) >= count:
            break
        key = each.numbers, each.timer.split_backward
        found = each.time_s, each
        if found[0] < math.inf and (key not in best or _by_time(found) < _by_time(best[key])):
            best[key] = found
    return sorted(best.values(), key=_by_time)[:count]


def _by_time(timed: tuple[float, Depth]) -> tuple[float, int, bool]:
    time_s, each = timed
    return time_s, each.depth, each.timer.split_backward


def promising(possible: Iterable[Depth], *, effort: int | None, fewest: int) -> list[Depth]:
    """A few of least time, with at least `fewest` pipelines, of which a look at does not cost too much."""
    cheap = (
        each for each in possible if each.numbers[0] >= fewest and not is_dear(each.depth, each.micro_batches, effort)
    )
    return [each for _, each in of_least_time(cheap, _FEW)]
