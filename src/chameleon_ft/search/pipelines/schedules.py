"""Pipelines with their schedules: scheduled once for all that differ only in which worker is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Final

from chameleon_ft.estimate import peak_bytes_of
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import PipelineTimes
from chameleon_ft.schedule.best import PipelineSchedule, ScheduledPart, pipeline_schedule
from chameleon_ft.schedule.components import components
from chameleon_ft.schedule.costs import pipeline_times
from chameleon_ft.schedule.records import Integers
from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.stages import Stages
from chameleon_ft.search.pipelines.worker_classes import Shape, WorkerPool

__all__ = ["PipelineScheduler", "PipelineSpec", "TimedPipeline", "hops_of"]

# List schedules that are made with any effort.
_LEAST_SCHEDULES: Final = 7
# Stages of one cut recur in many pipelines.
_layers: Final = lru_cache(maxsize=20_000)(LayerRange)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A pipeline, whichever workers of its classes it is on.

    Attributes:
        shape: class of each worker.
        cut_points: where its stages stop.
        options: the option of each stage in `Stages`: which of its layers it recomputes.
        micro_batches: its share of the global batch.
    """

    shape: Shape
    cut_points: tuple[int, ...]
    options: tuple[int, ...]
    micro_batches: int


@dataclass(frozen=True, slots=True, eq=False)
class TimedPipeline:
    """A pipeline with a schedule.

    Attributes:
        spec: the pipeline.
        recomputed: layers that each stage recomputes.
        schedule: operations of each stage in order.
        scheduler: the one that made the schedule.
    """

    spec: PipelineSpec
    recomputed: tuple[RecomputedLayers | None, ...]
    schedule: PipelineSchedule
    scheduler: PipelineScheduler

    @property
    def cut_points(self) -> tuple[int, ...]:
        """Where its stages stop."""
        return self.spec.cut_points

    @property
    def program_s(self) -> float:
        """Seconds until the last operation has ended."""
        return self.schedule.step_s

    @property
    def ends_s(self) -> tuple[float, ...]:
        """Seconds until the last operation of each stage has ended; it makes gradients."""
        return self.schedule.last_s


class PipelineScheduler:
    """Schedules pipelines with split, or with fused backward, and remembers the schedules.

    Attributes:
        stages: of the model.
        pool: the live workers.
        split_backward: whether backward is split in two.
        limits: by `PipelineSpec` the limits of its stages, see `Stages.limits`.
        peak_bytes: by `TimedPipeline` the bytes that its worker of most need holds at its worst moment.
        spent: the effort so far, in operations that may have been scheduled.
    """

    def __init__(self, stages: Stages, pool: WorkerPool, options: SearchOptions) -> None:
        self.stages = stages
        self.pool = pool
        self.split_backward = stages.split_backward
        self.limits = cache(self._limits)
        self.peak_bytes = cache(self._peak_bytes)
        self.spent = 0
        self._options = options
        self._hosts = stages.costs.cluster.hosts
        self._scheduled: dict[tuple[PipelineSpec, tuple[bool, ...]], tuple[int, TimedPipeline]] = {}
        self._replayed: dict[tuple[TimedPipeline, tuple[bool, ...]], TimedPipeline] = {}

    def scheduled(
        self, spec: PipelineSpec, *, effort: int, workers: Sequence[int] | None = None
    ) -> TimedPipeline | None:
        """Return the pipeline with the best schedule that so much effort finds; None where it does not fit.

        It is on the first workers of its classes unless `workers` are given, of which only counts which neighbours
        share a host. A schedule found with more effort before is returned instead.
        """
        limits = self.limits(spec)
        if limits is None:
            return None
        workers = self.pool.sample(spec.shape) if workers is None else workers
        key = spec, self._share_hosts(workers)
        found = self._scheduled.get(key)
        if found is None or found[0] < effort:
            least = _LEAST_SCHEDULES * (3 if self.split_backward else 2) * len(workers) * spec.micro_batches
            self.spent += max(effort, least)
            recomputed = self.stages.recomputed_layers(spec.cut_points, spec.options)
            schedule = pipeline_schedule(
                self._times(spec.cut_points, recomputed, workers),
                spec.micro_batches,
                split_backward=self.split_backward,
                in_flight_limits=limits,
                effort=effort,
                # The program that will be run is not given up early.
                slack=self._options.slack if effort < self._options.polish_effort else ROUNDING,
            )
            found = self._scheduled[key] = effort, TimedPipeline(spec, recomputed, schedule, self)
        return found[1]

    def replayed(self, timed: TimedPipeline, workers: Sequence[int]) -> TimedPipeline:
        """Return the pipeline with the same orders of operations on these workers."""
        key = timed, self._share_hosts(workers)
        if key not in self._replayed:
            schedule = timed.schedule.replayed(self._times(timed.cut_points, timed.recomputed, workers))
            self._replayed[key] = TimedPipeline(timed.spec, timed.recomputed, schedule, self)
        return self._replayed[key]

    def _limits(self, spec: PipelineSpec) -> Integers | None:
        return self.stages.limits(spec.shape, spec.cut_points, spec.options, spec.micro_batches)

    def _peak_bytes(self, timed: TimedPipeline) -> int:
        hops = hops_of(range(len(timed.cut_points)), timed.cut_points)
        placement = Placement(self.stages.num_layers, {hop.worker: (hop.layers,) for hop in hops})
        routes = tuple(Route(number, hops) for number in range(timed.spec.micro_batches))
        recompute = {stage: own for stage, own in enumerate(timed.recomputed) if own is not None}
        plan = Plan(placement, routes, self.split_backward, recompute)
        parts = [ScheduledPart(component, timed.schedule) for component in components(routes)]
        return max(peak_bytes_of(plan, parts, self.stages.costs).values())

    def _share_hosts(self, workers: Sequence[int]) -> tuple[bool, ...]:
        """Return for each two neighbours whether they share a host."""
        return tuple(self._hosts[one] == self._hosts[other] for one, other in pairwise(workers))

    def _times(
        self, cut_points: Sequence[int], recomputed: Sequence[RecomputedLayers | None], workers: Sequence[int]
    ) -> PipelineTimes:
        return pipeline_times(
            hops_of(workers, cut_points),
            self.stages.costs,
            split_backward=self.split_backward,
            recompute={worker: own for worker, own in zip(workers, recomputed, strict=True) if own is not None},
        )


def hops_of(workers: Sequence[int], cut_points: Sequence[int]) -> tuple[Hop, ...]:
    """Return the route through these workers."""
    return tuple(map(Hop, workers, map(_layers, (0, *cut_points[:-1]), cut_points)))
