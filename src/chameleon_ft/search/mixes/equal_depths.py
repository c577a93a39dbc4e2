"""Layouts of pipelines of about equal depth, whose gradients can be reduced together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.pipeline_search import PipelineSearch
from chameleon_ft.search.pipelines.sync_bounds import SyncCost, SyncLowerBound
from chameleon_ft.workload import Workload

# With up to this many workers, every depth is searched with every number of pipelines that there are workers for.
_ALL_NUMBERS: Final = 64


@dataclass(frozen=True, slots=True)
class EqualDepths:
    """Pipelines of one depth; workers that are left over are idle or make some pipelines one stage deeper.

    Attributes:
        depth: stages of most pipelines.
        number: of pipelines.
        sync: the least that gradient sync takes with so many.
        pipelines: cuts and schedules them.
        estimate_s: estimated seconds of the step.
    """

    depth: int
    number: int
    sync: SyncCost
    pipelines: PipelineSearch
    estimate_s: float

    def shapes(self, *, mixed: bool) -> list[tuple[int, ...]]:
        """Return the shapes of the pipelines: of its depth, or also one stage deeper."""
        layers = self.pipelines.scheduler.stages.num_layers
        return [(0,) * depth for depth in range(self.depth, self.depth + (2 if mixed else 1)) if depth <= layers]


def promising_layouts(
    searches: Iterable[PipelineSearch],
    workers: int,
    least_sync: SyncLowerBound,
    options: SearchOptions,
    workload: Workload,
) -> list[EqualDepths]:
    """Return layouts of workers of one class by their estimate, the best first, without those that do not fit."""
    num_bytes = sum(layer.gradient_bytes for layer in workload.layers)
    layers = len(workload.layers)
    found: list[EqualDepths] = []
    for pipelines in searches:
        for depth in range(1, min(workers, layers) + 1):
            for number in _numbers(workers, depth, layers, workload.micro_batches):
                if number < options.least_holders:
                    continue
                sync = least_sync.of(number)
                estimate_s = _estimate_s(pipelines, depth, workload.micro_batches / number)
                estimate_s += sync.fixed_s + sync.per_byte_s * num_bytes / depth
                if estimate_s < math.inf:
                    found.append(EqualDepths(depth, number, sync, pipelines, estimate_s))
    return sorted(found, key=lambda layout: (layout.estimate_s, layout.depth, layout.number))


def _numbers(workers: int, depth: int, layers: int, micro_batches: int) -> range:
    """Return the numbers of pipelines of this depth to look at.

    If there are many workers, few of them are idle or in pipelines one stage deeper.
    """
    most = min(workers // depth, micro_batches)
    if workers <= _ALL_NUMBERS:
        return range(1, most + 1)
    fewest = workers // (depth + 1) if depth < layers else most
    return range(max(1, fewest, most - 1), most + 1)


def _estimate_s(pipelines: PipelineSearch, depth: int, share: float) -> float:
    """Return the estimate of the mean share, interpolated between whole numbers of micro-batches."""
    estimates, low = pipelines.estimates, math.floor(share)
    low_s = estimates.quick_s((0,) * depth, low)
    if share == low or low_s == math.inf:
        return low_s
    # Pipelines one stage deeper, of workers that are left over, take some of the work.
    return low_s + (share - low) * (estimates.quick_s((0,) * depth, low + 1) - low_s)
