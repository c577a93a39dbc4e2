"""What pipelines of about equal depth promise, where gradients are to be reduced."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import SyncCost
from chameleon_ft.search._effort import is_dear
from chameleon_ft.search._sync import about, least_sync
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
        time_s: the least that they take if all are equal.
        sync: what that counts for gradient sync.
        timer: schedules them.
    """

    depth: int
    numbers: tuple[int, int]
    micro_batches: float
    time_s: float
    sync: SyncCost
    timer: Timer


def depths(costs: CostModel, timers: Iterable[Timer], likely_s: float) -> list[Depth]:
    """Those at which nobody goes without a micro-batch; steps that take longer than `likely_s` are not thought of."""
    cluster, micro_batches = costs.cluster, costs.workload.micro_batches
    workers = len(cluster.workers)
    found: list[Depth] = []
    for timer in timers:
        for depth in range(1, min(workers, timer.pipelines.num_layers) + 1):
            fewest = workers // depth
            if fewest <= micro_batches:
                share, numbers = micro_batches * depth / workers, (fewest, min(-(-workers // depth), micro_batches))
                sync = least_sync(costs, about(fewest, cluster), likely_s)
                time_s = timer.mean_bound_s(depth, share, sync)
                if time_s < math.inf:
                    found.append(Depth(depth, numbers, share, time_s, sync, timer))
    return found


def promising(found: Sequence[Depth], *, effort: int | None, fewest: int) -> list[Depth]:
    """A few of least time, with at least `fewest` pipelines, of which a look at does not cost too much.

    Of depths that go with the same numbers of pipelines, one stands for all.
    """
    cheap = [
        each for each in found if each.numbers[0] >= fewest and not is_dear(each.depth, each.micro_batches, effort)
    ]
    different: dict[tuple[tuple[int, int], bool], Depth] = {}
    for each in sorted(cheap, key=lambda each: (each.time_s, each.depth, each.timer.split_backward)):
        different.setdefault((each.numbers, each.timer.split_backward), each)
    return list(different.values())[:_FEW]
