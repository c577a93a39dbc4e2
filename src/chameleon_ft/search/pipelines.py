"""The best pipeline of given workers for a share of the micro-batches: where to cut it, and what to recompute.

Pipelines that differ only in which worker is which are scheduled once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from typing import Final, TypeAlias

import numpy as np

from chameleon_ft.cost.step import peak_bytes_of
from chameleon_ft.plan import PipelineLayout, RecomputedLayers, pipelines_plan
from chameleon_ft.plan.layouts import pipeline_hops
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import PipelineTimes
from chameleon_ft.schedule.best import PipelineSchedule, ScheduledPart, pipeline_schedule
from chameleon_ft.schedule.network import pipeline_times
from chameleon_ft.schedule.records import Booleans, Integers, components
from chameleon_ft.search.bounds import CutPoints, PipelineBounds, SyncCost
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import Shape, WorkerPool

# List schedules that are made with any effort.
_MIN_SCHEDULES: Final = 7
# By how much more than `Stages.limits` a stage is given at first.
_LOOSER: Final = (1, 2, 4)
# By how much more single stages are given then: in flight, kept, and W that wait.
_RAISED: Final = ((1, 1, 1), (0, 1, 1), (1, 1, 0))
# Operations to schedule for each of these attempts; and for all of them, as a share of all others, and at least.
_TRIAL: Final = 10_000
_LOOSENING: Final = 0.3
_MIN_LOOSENING: Final = 500_000


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
        limits: by `PipelineSpec` the limits of its stages, see `Stages.limits`.
        peak_bytes: by `TimedPipeline` the bytes that its worker of most need holds at its worst moment.
        spent: the effort so far, in operations that may have been scheduled.
    """

    def __init__(self, stages: Stages, pool: WorkerPool, options: SearchOptions) -> None:
        self.stages = stages
        self.pool = pool
        self.split_backward = stages.split_backward
        self.limits = cache(lambda spec: stages.limits(spec.shape, spec.cut_points, spec.options, spec.micro_batches))
        self.peak_bytes = cache(lambda timed: int(self._stage_bytes(timed).max()))
        self.spent = 0
        self._options = options
        self._hosts = stages.costs.cluster.hosts
        self._scheduled: dict[tuple[PipelineSpec, tuple[bool, ...]], tuple[int, TimedPipeline]] = {}
        self._spent_loosening = 0
        self._loosened: set[tuple[PipelineSpec, tuple[bool, ...]]] = set()
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
            self.spent += max(effort, self._min_effort(spec))
            found = self._scheduled[key] = effort, self._timed(spec, limits, workers, effort)
        return found[1]

    def loosened(self, timed: TimedPipeline, *, workers: Sequence[int] | None = None, best_s: float) -> TimedPipeline:
        """Return the pipeline under larger limits with which it ends earlier and fits the memory nevertheless.

        `Stages.limits` holds for any order of operations: it assumes that all buffers for messages are full, and that
        the operation that needs most memory runs when most is kept. From limits that are larger, those of the stages
        that exceed their memory are lowered until all fit.

        Returns:
            The pipeline as given if that makes it no faster, if it would take `best_s` without any limits, or if too
            much effort has gone into such attempts. A faster one is remembered as its schedule.
        """
        workers = self.pool.sample(timed.spec.shape) if workers is None else workers
        key = timed.spec, self._share_hosts(workers)
        least, most = timed.schedule.in_flight_limits, timed.spec.micro_batches
        if not self.stages.limited or (least >= most).all() or key in self._loosened or not self._may_loosen():
            return timed
        free = self._tried(timed, np.full_like(least, most), workers)
        if free.program_s >= min(best_s, timed.program_s) * (1 - ROUNDING):
            return timed
        self._loosened.add(key)
        best = timed
        for more in _LOOSER:
            limits = np.maximum(least, np.minimum(least + more, most))
            while (limits > least).any() and self._may_loosen():
                other = self._tried(timed, limits, workers)
                if other.program_s >= best.program_s * (1 - ROUNDING):
                    break
                exceeded = self._exceeded(other)
                if not exceeded.any():
                    best = other
                    break
                lowered = np.maximum(least, limits - exceeded)
                if (lowered == limits).all():
                    break
                limits = lowered
        improved = True
        while improved and free.program_s < best.program_s * (1 - ROUNDING):
            improved = False
            for stage, raised in product(range(len(workers)), _RAISED[: 3 if self.split_backward else 1]):
                if not self._may_loosen():
                    break
                limits = best.schedule.in_flight_limits.copy()
                limits[:, stage] = np.maximum(limits[:, stage], np.minimum(limits[:, stage] + raised, most))
                other = self._tried(timed, limits, workers)
                if other.program_s < best.program_s * (1 - ROUNDING) and not self._exceeded(other).any():
                    best, improved = other, True
        if best is not timed:
            other = self._timed(timed.spec, best.schedule.in_flight_limits, workers, self._options.polish_effort)
            best = timed if other.program_s >= timed.program_s or self._exceeded(other).any() else other
        if best is not timed:
            self._scheduled[key] = self._options.polish_effort, best
        return best

    def _min_effort(self, spec: PipelineSpec) -> int:
        return _MIN_SCHEDULES * (3 if self.split_backward else 2) * len(spec.shape) * spec.micro_batches

    def _may_loosen(self) -> bool:
        is_unlimited = math.isinf(self._options.effort)
        return is_unlimited or self._spent_loosening <= _LOOSENING * self.spent + _MIN_LOOSENING

    def _tried(self, timed: TimedPipeline, limits: Integers, workers: Sequence[int]) -> TimedPipeline:
        """Return the pipeline with a schedule under these limits that takes little effort."""
        self._spent_loosening += max(_TRIAL, self._min_effort(timed.spec))
        return self._timed(timed.spec, limits, workers, _TRIAL)

    def _exceeded(self, timed: TimedPipeline) -> Booleans:
        """Return the stages that exceed the memory of their workers."""
        capacities = np.array([self.stages.capacities[kind] for kind in timed.spec.shape])
        found: Booleans = (capacities >= 0) & (self._stage_bytes(timed) > capacities)
        return found

    def _timed(self, spec: PipelineSpec, limits: Integers, workers: Sequence[int], effort: int) -> TimedPipeline:
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
        return TimedPipeline(spec, recomputed, schedule, self)

    def replayed(self, timed: TimedPipeline, workers: Sequence[int]) -> TimedPipeline:
        """Return the pipeline with the same orders of operations on these workers."""
        key = timed, self._share_hosts(workers)
        if key not in self._replayed:
            schedule = timed.schedule.replayed(self._times(timed.cut_points, timed.recomputed, workers))
            self._replayed[key] = TimedPipeline(timed.spec, timed.recomputed, schedule, self)
        return self._replayed[key]

    def _stage_bytes(self, timed: TimedPipeline) -> Integers:
        """Return the peak of each stage."""
        stages = range(len(timed.cut_points))
        recompute = {stage: own for stage, own in enumerate(timed.recomputed) if own is not None}
        layout = PipelineLayout(timed.cut_points, tuple(stages), timed.spec.micro_batches)
        plan = pipelines_plan([layout], split_backward=self.split_backward, recompute=recompute)
        parts = [ScheduledPart(component, timed.schedule) for component in components(plan.routes)]
        peaks = peak_bytes_of(plan, parts, self.stages.costs)
        return np.array([peaks[stage] for stage in stages], np.int64)

    def _share_hosts(self, workers: Sequence[int]) -> tuple[bool, ...]:
        """Return for each two neighbours whether they share a host."""
        return tuple(self._hosts[one] == self._hosts[other] for one, other in pairwise(workers))

    def _times(
        self, cut_points: Sequence[int], recomputed: Sequence[RecomputedLayers | None], workers: Sequence[int]
    ) -> PipelineTimes:
        return pipeline_times(
            pipeline_hops(workers, cut_points),
            self.stages.costs,
            split_backward=self.split_backward,
            recompute={worker: own for worker, own in zip(workers, recomputed, strict=True) if own is not None},
        )


BestPipeline: TypeAlias = tuple[float, TimedPipeline | None]
"""Seconds, gradient sync included, and the pipeline; infinite and None if none fits."""

# How close to its bound a pipeline is good enough in a search that is not complete.
_GOOD_ENOUGH_GAP: Final = 0.005
# A cut is scheduled only if its estimate is below the best time so far by this share.
_MIN_GAIN: Final = 0.003
# Where memory is limited, stages are given room for these shares of the micro-batches that 1F1B has in flight there,
# and then for as many as the bound takes. With less room they recompute less, but are idle more.
_IN_FLIGHT_SHARES: Final = (1.25, 1.0, 0.85, 0.7, 0.0)
# Cuts in a row without an improvement that end the search among those of one estimate.
_PATIENCE: Final = 3
# The cuts of one pipeline may take this many times the effort of a search.
_EFFORT: Final = 4
# Pipelines that take longer by no more than this share are similar; so many of them are kept.
_SIMILAR: Final = 0.01
_MAX_SIMILAR: Final = 3
_NO_SYNC: Final = SyncCost()


class PipelineSearch:
    """Cuts pipelines and schedules them.

    Attributes:
        bounds: bounds on pipelines before their gradients are reduced.
        estimates: estimates of these pipelines, see `PipelineBounds`.
        cut_short: a complete search has left out pipelines, because there were too many.
    """

    def __init__(self, scheduler: PipelineScheduler, options: SearchOptions) -> None:
        self.scheduler = scheduler
        self.cut_short = False
        self._options = options
        self._bounds = cache(partial(PipelineBounds, scheduler.stages))
        self._scheduled: dict[tuple[Shape, int], dict[PipelineSpec, TimedPipeline]] = {}
        self.bounds = self.bounds_with(_NO_SYNC)
        self.estimates, *_ = self._estimates_with(_NO_SYNC)

    def bounds_with(self, sync: SyncCost) -> PipelineBounds:
        """Return bounds on pipelines that then reduce their gradients."""
        return self._bounds(sync, 0.0)

    def _estimates_with(self, sync: SyncCost) -> list[PipelineBounds]:
        """Return estimates of pipelines that then reduce their gradients, with more room and less; bounds come last."""
        shares = _IN_FLIGHT_SHARES if self.scheduler.stages.limited else (0.0,)
        return [self._bounds(sync, share) for share in shares]

    def best(self, shape: Shape, micro_batches: int, sync: SyncCost = _NO_SYNC) -> BestPipeline:
        """Return the pipeline of least time over its cuts and options.

        A complete search tries all of them, others the few with the least estimates.
        """
        most = self.scheduler.spent + _EFFORT * self._options.effort
        if self._options.complete:
            return self._best_of_all(shape, micro_batches, self.bounds_with(sync), most)
        best: BestPipeline = math.inf, None
        for bounds in self._estimates_with(sync):
            is_spent = best[1] is not None and self.scheduler.spent > most
            if is_spent or best[0] <= bounds.min_s(shape, micro_batches) * (1 + _GOOD_ENOUGH_GAP):
                break
            without_gain = 0
            for estimate_s, spec in self._candidates(shape, micro_batches, bounds):
                if estimate_s < best[0] * (1 - (_MIN_GAIN if sync == _NO_SYNC else -_SIMILAR)):
                    found = self._better(best, spec, bounds)
                    without_gain = 0 if found is not best else without_gain + 1
                    best = found
                if without_gain == _PATIENCE or (best[1] is not None and self.scheduler.spent > most):
                    break
        return best

    @staticmethod
    def specs(
        shape: Shape, micro_batches: int, bounds: PipelineBounds, limit_s: float
    ) -> list[tuple[float, PipelineSpec]]:
        """Return all cuts with all options, and their bounds up to a limit, the least first."""
        found: list[tuple[float, CutPoints, tuple[int, ...]]] = []
        for cut_points in bounds.cuts(shape, micro_batches, limit_s=limit_s):
            for options in product(*bounds.stages.options_of(shape, cut_points)):
                own_s = bounds.bound_s(shape, cut_points, micro_batches, options)
                if own_s <= limit_s * (1 + ROUNDING):
                    found.append((own_s, cut_points, options))
        return [(own_s, PipelineSpec(shape, cut, options, micro_batches)) for own_s, cut, options in sorted(found)]

    def similar(self, timed: TimedPipeline) -> list[TimedPipeline]:
        """Return the pipeline, and others of its shape and share with other cuts that take hardly longer.

        These were scheduled before, and the fastest come first; gradient sync may make one of them the better choice.
        """
        known = self._scheduled.get((timed.spec.shape, timed.spec.micro_batches), {})
        others = [each for each in known.values() if each.cut_points != timed.cut_points]
        close = (each for each in others if each.program_s <= timed.program_s * (1 + _SIMILAR))
        return [timed, *sorted(close, key=lambda each: each.program_s)[: _MAX_SIMILAR - 1]]

    def _best_of_all(self, shape: Shape, micro_batches: int, bounds: PipelineBounds, most: float) -> BestPipeline:
        best: BestPipeline = math.inf, None
        for _, spec in self._candidates(shape, micro_batches, bounds):
            best = self._better(best, spec, bounds)
        if best[0] > bounds.min_s(shape, micro_batches) * (1 + ROUNDING):
            for bound_s, spec in self.specs(shape, micro_batches, bounds, best[0]):
                if bound_s >= best[0] * (1 - ROUNDING):
                    break
                if self.scheduler.spent > most:
                    self.cut_short = True
                    break
                best = self._better(best, spec, bounds)
        return best

    @staticmethod
    def _candidates(shape: Shape, micro_batches: int, bounds: PipelineBounds) -> Iterator[tuple[float, PipelineSpec]]:
        """Yield cuts, each with some choices of options, and their estimates."""
        for cut_points in bounds.candidates(shape, micro_batches, far=True):
            for estimate_s, options in bounds.chosen(shape, cut_points, micro_batches):
                yield estimate_s, PipelineSpec(shape, cut_points, options, micro_batches)

    def _better(self, best: BestPipeline, spec: PipelineSpec, bounds: PipelineBounds) -> BestPipeline:
        timed = self.scheduler.scheduled(spec, effort=self._options.look_effort)
        if timed is None:
            return best
        if self._options.complete:
            timed = self.scheduler.loosened(timed, best_s=best[0])
        self._scheduled.setdefault((spec.shape, spec.micro_batches), {})[spec] = timed
        own_s = synced_s(timed, bounds)
        return (own_s, timed) if own_s < best[0] else best


def synced_s(timed: TimedPipeline, bounds: PipelineBounds) -> float:
    """Return the seconds until the program has ended and every stage has reduced its gradients as `bounds` has it."""
    return max(timed.program_s, float((bounds.sync_s_of(timed.cut_points) + timed.ends_s).max()))
