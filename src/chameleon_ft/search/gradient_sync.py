"""Gradient sync of pipelines side by side: the least it takes, and what it takes on given workers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.estimate import reduction_times
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.schedules import TimedPipeline
from chameleon_ft.search.stages import links_between
from chameleon_ft.sync import gradient_rounds, segment_bytes
from chameleon_ft.workload import Workload

__all__ = ["GradientSync", "SyncCost", "SyncLowerBound", "has_gradients", "links_are_equal", "numbers_of_pipelines"]

# Numbers of pipelines that differ by up to this share have a common bound: their rings take nearly the same time.
_ALIKE: Final = 0.1


def has_gradients(workload: Workload) -> bool:
    """Whether there is anything to reduce."""
    return any(layer.gradient_bytes for layer in workload.layers)


def links_are_equal(cluster: Cluster) -> bool:
    """Whether it does not matter which workers share a host."""
    return cluster.intra_host == cluster.inter_host or len(cluster.host_sizes) in (1, len(cluster.workers))


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
        """The least cost with this number of pipelines."""
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
        """Bytes of gradients, of layers that take time, that a host with a worker for each pipeline makes at most."""
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
    """Ranges (first, last) that cover 2 to `most`, each of numbers that are nearly the same."""
    first = 2
    while first <= most:
        last = min(most, int(first * (1 + _ALIKE)))
        yield first, last
        first = last + 1


class GradientSync:
    """Gradient sync of pipelines on workers of a cluster: `estimate_sync` without a plan or a program."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._is_free = not has_gradients(costs.workload)
        self._known: dict[tuple[tuple[TimedPipeline, tuple[int, ...]], ...], float] = {}
        self._reductions = cache(partial(_reductions, costs.workload))

    def step_s(self, pipelines: Sequence[tuple[TimedPipeline, tuple[int, ...]]]) -> float:
        """Seconds until all operations have ended and all gradients are reduced, of pipelines with their workers."""
        key = tuple(pipelines)
        if key not in self._known:
            program_s = max(timed.program_s for timed, _ in pipelines)
            self._known[key] = program_s if self._is_free else max(program_s, self._reduced_s(pipelines))
        return self._known[key]

    def _reduced_s(self, pipelines: Sequence[tuple[TimedPipeline, tuple[int, ...]]]) -> float:
        """Seconds until the last gradients are reduced; zero if no two workers hold the same parameters."""
        workers_of = [worker for _, workers in pipelines for worker in workers]
        free_s = dict(enumerate(end_s for timed, _ in pipelines for end_s in timed.ends_s))
        ring_s = self._costs.cluster.ring_all_reduce_s
        reductions = (
            (holders, 0.0, ring_s([workers_of[slot] for slot in holders], num_bytes))
            for holders, num_bytes in self._reductions(tuple(timed.cut_points for timed, _ in pipelines))
        )
        return max((end_s for _, end_s in reduction_times(reductions, free_s)), default=0.0)


def _reductions(workload: Workload, cut_points: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], int]]:
    """(holders, bytes) of all reductions of pipelines with these cut points, in the order in which workers issue them.

    Holders are stages, counted through all pipelines.
    """
    ranges = (LayerRange(start, stop) for own in cut_points for start, stop in pairwise((0, *own)))
    placement = Placement(len(workload.layers), {slot: (layers,) for slot, layers in enumerate(ranges)})
    return [
        (segment.holders, num_bytes)
        for segment in gradient_rounds(placement, workload.tied_layers).order
        if (num_bytes := segment_bytes(segment, workload))
    ]
