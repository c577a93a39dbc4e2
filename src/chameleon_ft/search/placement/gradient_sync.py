"""Gradient sync of pipelines on given workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TypeAlias

from chameleon_ft.cluster import Cluster
from chameleon_ft.estimate import reduction_times
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.pipelines.schedules import TimedPipeline
from chameleon_ft.search.pipelines.sync_bounds import has_gradients
from chameleon_ft.sync import gradient_rounds, segment_bytes

PlacedPipelines: TypeAlias = tuple[tuple[TimedPipeline, tuple[int, ...]], ...]
"""Pipelines, each with its workers."""


def links_are_equal(cluster: Cluster) -> bool:
    """Return whether it does not matter which workers share a host, and no link is slow."""
    are_equal = cluster.intra_host == cluster.inter_host or len(cluster.host_sizes) in (1, len(cluster.workers))
    return are_equal and not cluster.slow_links


class GradientSync:
    """Gradient sync of pipelines on workers of a cluster: `estimate_sync` without a plan or a program."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._is_free = not has_gradients(costs.workload)
        self._cached_step_s = cache(self._uncached_step_s)
        self._reductions = cache(self._ordered_reductions)

    def step_s(self, pipelines: Sequence[tuple[TimedPipeline, tuple[int, ...]]]) -> float:
        """Return the seconds until all operations of the pipelines have ended and all gradients are reduced."""
        return self._cached_step_s(tuple(pipelines))

    def _uncached_step_s(self, pipelines: PlacedPipelines) -> float:
        program_s = max(timed.program_s for timed, _ in pipelines)
        if self._is_free:
            return program_s
        workers_of = [worker for _, workers in pipelines for worker in workers]
        free_s = dict(enumerate(end_s for timed, _ in pipelines for end_s in timed.ends_s))
        ring_s = self._costs.cluster.ring_all_reduce_s
        reductions = (
            (holders, 0.0, ring_s([workers_of[slot] for slot in holders], num_bytes))
            for holders, num_bytes in self._reductions(tuple(timed.cut_points for timed, _ in pipelines))
        )
        return max([program_s, *(end_s for _, end_s in reduction_times(reductions, free_s))])

    def _ordered_reductions(self, cut_points: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], int]]:
        """Return (holders, bytes) of all reductions of pipelines with these cuts, in the order of their issue.

        Holders are stages, counted through all pipelines.
        """
        workload = self._costs.workload
        ranges = (LayerRange(start, stop) for own in cut_points for start, stop in pairwise((0, *own)))
        placement = Placement(len(workload.layers), {slot: (layers,) for slot, layers in enumerate(ranges)})
        return [
            (segment.holders, num_bytes)
            for segment in gradient_rounds(placement, workload.tied_layers).order
            if (num_bytes := segment_bytes(segment, workload))
        ]
