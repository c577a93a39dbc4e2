"""The best pipeline of given workers for a share of the micro-batches: where to cut it, and what to recompute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Final, TypeAlias

from chameleon_ft.quantities import ROUNDING
from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.bounds import CutPoints, PipelineBounds
from chameleon_ft.search.pipelines.schedules import PipelineScheduler, PipelineSpec, TimedPipeline
from chameleon_ft.search.pipelines.sync_bounds import SyncCost
from chameleon_ft.search.pipelines.worker_classes import Shape

BestPipeline: TypeAlias = tuple[float, TimedPipeline | None]
"""Seconds, gradient sync included, and the pipeline; infinite and None if none fits."""

# How close to its bound a pipeline is good enough in a search that is not complete.
_GOOD_ENOUGH_GAP: Final = 0.005
# A cut is scheduled only if its estimate is below the best time so far by this share.
_LEAST_GAIN: Final = 0.003
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
        scheduler: schedules the pipelines.
        bounds: on pipelines before their gradients are reduced.
        estimates: of the same, see `PipelineBounds`.
        cut_short: whether a complete search has left out pipelines, because there were too many.
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
            if is_spent or best[0] <= bounds.least_s(shape, micro_batches) * (1 + _GOOD_ENOUGH_GAP):
                break
            without_gain = 0
            for estimate_s, spec in self._candidates(shape, micro_batches, bounds):
                if estimate_s < best[0] * (1 - (_LEAST_GAIN if sync == _NO_SYNC else -_SIMILAR)):
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
        if best[0] > bounds.least_s(shape, micro_batches) * (1 + ROUNDING):
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
