"""Pipelines with their schedules: scheduled once for all that differ only in which worker is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from chameleon_ft.estimate import peak_bytes_of
from chameleon_ft.plan import Hop, LayerRange, PipelineLayout, Plan, RecomputedLayers, pipelines_plan
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
        spent: the effort so far, in operations that may have been scheduled.
    """

    def __init__(self, stages: Stages, pool: WorkerPool, options: SearchOptions) -> None:
        self.stages = stages
        self.pool = pool
        self.spent = 0
        self._costs = stages.costs
        self._options = options
        self._hosts = self._costs.cluster.hosts
        self._limits: dict[PipelineSpec, Integers | None] = {}
        self._known: dict[tuple[PipelineSpec, tuple[bool, ...]], tuple[int, TimedPipeline]] = {}
        self._replayed: dict[tuple[TimedPipeline, tuple[bool, ...]], TimedPipeline] = {}
        self._peaks: dict[TimedPipeline, int] = {}

    @property
    def split_backward(self) -> bool:
        """Whether backward is split in two."""
        return self.stages.split_backward

    def limits(self, spec: PipelineSpec) -> Integers | None:
        """Limits of each stage, int64 [3, stages], see `Stages.limits`; None if a stage does not fit."""
        if spec not in self._limits:
            self._limits[spec] = self.stages.limits(spec.shape, spec.cut_points, spec.options, spec.micro_batches)
        return self._limits[spec]

    def scheduled(
        self, spec: PipelineSpec, *, effort: int, workers: Sequence[int] | None = None
    ) -> TimedPipeline | None:
        """The pipeline with the best schedule that so much effort finds, or a better one that is known.

        None where it does not fit. On the first workers of its classes unless `workers` are given; what counts of them
        is which neighbours share a host.
        """
        limits = self.limits(spec)
        if limits is None:
            return None
        workers = self.pool.sample(spec.shape) if workers is None else workers
        key = spec, self._neighbours(workers)
        known = self._known.get(key)
        if known is None or known[0] < effort:
            self.spent += max(
                effort, _LEAST_SCHEDULES * (3 if self.split_backward else 2) * len(workers) * spec.micro_batches
            )
            schedule = pipeline_schedule(
                self._times(spec, workers),
                spec.micro_batches,
                split_backward=self.split_backward,
                in_flight_limits=limits,
                effort=effort,
                # The program that will be run is not given up early.
                slack=self._options.slack if effort < self._options.polish_effort else ROUNDING,
            )
            recomputed = self.stages.recomputed_layers(spec.cut_points, spec.options)
            known = self._known[key] = effort, TimedPipeline(spec, recomputed, schedule, self)
        return known[1]

    def replayed(self, timed: TimedPipeline, workers: Sequence[int]) -> TimedPipeline:
        """The pipeline with the same orders of operations on these workers."""
        key = timed, self._neighbours(workers)
        if key not in self._replayed:
            schedule = timed.schedule.replayed(self._times(timed.spec, workers))
            self._replayed[key] = TimedPipeline(timed.spec, timed.recomputed, schedule, self)
        return self._replayed[key]

    def peak_bytes(self, timed: TimedPipeline) -> int:
        """Bytes that the worker that needs most memory holds at its worst moment."""
        if timed not in self._peaks:
            stages = range(len(timed.cut_points))
            layout = PipelineLayout(timed.cut_points, tuple(stages), timed.spec.micro_batches)
            recompute = {stage: own for stage, own in zip(stages, timed.recomputed, strict=True) if own is not None}
            plan = pipelines_plan([layout], split_backward=self.split_backward)
            plan = Plan(plan.placement, plan.routes, plan.split_backward, recompute)
            parts = [ScheduledPart(component, timed.schedule) for component in components(plan.routes)]
            self._peaks[timed] = max(peak_bytes_of(plan, parts, self._costs).values())
        return self._peaks[timed]

    def _neighbours(self, workers: Sequence[int]) -> tuple[bool, ...]:
        """Which neighbours share a host."""
        return tuple(self._hosts[one] == self._hosts[other] for one, other in pairwise(workers))

    def _times(self, spec: PipelineSpec, workers: Sequence[int]) -> PipelineTimes:
        recomputed = self.stages.recomputed_layers(spec.cut_points, spec.options)
        return pipeline_times(
            hops_of(workers, spec.cut_points),
            self._costs,
            split_backward=self.split_backward,
            recompute={worker: own for worker, own in zip(workers, recomputed, strict=True) if own is not None},
        )


def hops_of(workers: Sequence[int], cut_points: Sequence[int]) -> tuple[Hop, ...]:
    """The route through these workers."""
    return tuple(map(Hop, workers, map(_layers, (0, *cut_points[:-1]), cut_points)))
