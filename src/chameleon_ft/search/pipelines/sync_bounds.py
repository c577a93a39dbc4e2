"""Lower bounds on gradient sync, by the number of pipelines side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final

import numpy as np

from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule.records import Floats
from chameleon_ft.search.pipelines.stages import links_between, sums_by_stage
from chameleon_ft.workload import Workload

# Numbers of pipelines that differ by up to this share have a common bound: their rings take nearly the same time.
_ALIKE: Final = 0.1


def has_gradients(workload: Workload) -> bool:
    """Return whether there is anything to reduce."""
    return any(layer.gradient_bytes for layer in workload.layers)


@dataclass(frozen=True, slots=True)
class SyncCost:
    """Seconds of gradient sync that follow the last operation of any stage.

    Attributes:
        fixed_s: latency, however many bytes there are.
        per_byte_s: for each byte of gradients.
        inside_bytes: bytes that a stage may reduce at that price, beside the gradients of layers that take no time.
        beyond_s: seconds more for each byte beyond that.
    """

    fixed_s: float = 0.0
    per_byte_s: float = 0.0
    inside_bytes: float = math.inf
    beyond_s: float = 0.0

    def of_stages(self, workload: Workload) -> Floats:
        """Return the seconds of every stage by start and stop, zero without gradients; float64 [L + 1, L + 1]."""
        layers = workload.layers
        num_bytes = sums_by_stage([float(layer.gradient_bytes) for layer in layers])
        for tied in workload.tied:
            # Parameters that several layers of a stage share are reduced once.
            before = np.searchsorted(np.array(tied.layers), np.arange(len(num_bytes)))
            copies = np.maximum(before[np.newaxis, :] - before[:, np.newaxis], 1)
            num_bytes -= (copies - 1) * float(tied.gradient_bytes)
        timeless = sums_by_stage(
            [0.0 if layer.forward_s + layer.least_backward_s else float(layer.gradient_bytes) for layer in layers]
        )
        beyond = np.maximum(0.0, num_bytes - timeless - self.inside_bytes)
        sync_s = self.fixed_s + self.per_byte_s * num_bytes + self.beyond_s * beyond
        return np.where(num_bytes > 0, sync_s, 0.0)


class SyncLowerBound:
    """Lower bound of the gradient sync of a stage with holders in some number of pipelines, in steps up to `most_s`.

    A ring of more workers than a host has goes between hosts, and its slowest link sets the pace. A smaller ring may
    lie inside a host. Then that host alone computes these layers for all micro-batches, so there is a limit to how many
    of them it can compute in the step; a stage that has more reduces the rest between hosts.
    """

    def __init__(self, costs: CostModel, most_s: float) -> None:
        self._costs = costs
        self._most_s = most_s
        self.of = cache(self._of)

    def _of(self, pipelines: int) -> SyncCost:
        """Return the least cost with this number of pipelines."""
        cluster = self._costs.cluster
        if pipelines < 2 or not has_gradients(self._costs.workload):
            return SyncCost()
        between_hosts = pipelines > cluster.host_sizes[0]
        links = [cluster.inter_host] if between_hosts else links_between(cluster)
        latency_s = min(link.latency_s for link in links)
        per_byte_s = 1 / max(link.bytes_per_s for link in links)
        passes = 2 * (pipelines - 1) / pipelines
        least = SyncCost(2 * (pipelines - 1) * latency_s, passes * per_byte_s)
        slower_s = 1 / cluster.inter_host.bytes_per_s - per_byte_s
        if between_hosts or cluster.inter_host not in links or slower_s <= 0:
            return least
        return SyncCost(least.fixed_s, least.per_byte_s, self._inside_bytes(pipelines), passes * slower_s)

    def _inside_bytes(self, pipelines: int) -> float:
        """Return the bytes of gradients that a host with a worker for each pipeline makes at most.

        Layers that take no time are not counted.
        """
        workload = self._costs.workload
        timed = ((layer.forward_s + layer.least_backward_s, float(layer.gradient_bytes)) for layer in workload.layers)
        busy = [(own_s, size) for own_s, size in timed if own_s > 0]
        if self._most_s == math.inf:
            return sum(size for _, size in busy)
        speeds: dict[str, list[float]] = defaultdict(list)
        for worker in self._costs.cluster.workers:
            speeds[worker.host].append(worker.speed)
        speed = max((sum(own) for own in speeds.values() if len(own) >= pipelines), default=0.0)
        # A fractional knapsack: no more than parts of layers, those with most bytes for their time, fit the time of the
        # host; and no more layers than of those that take least.
        budget_s = self._most_s * speed / workload.micro_batches * (1 + ROUNDING)
        count = sum(until_s <= budget_s for until_s in accumulate(sorted(own_s for own_s, _ in busy)))
        by_count = sum(sorted((size for _, size in busy), reverse=True)[:count])
        by_parts = 0.0
        for own_s, size in sorted(busy, key=lambda layer: -layer[1] / layer[0]):
            by_parts += size * min(1.0, budget_s / own_s)
            budget_s = max(0.0, budget_s - own_s)
        return min(by_count, by_parts)


def numbers_of_pipelines(most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) that cover 2 to `most`, each of numbers that are nearly the same."""
    first = 2
    while first <= most:
        last = min(most, int(first * (1 + _ALIKE)))
        yield first, last
        first = last + 1
