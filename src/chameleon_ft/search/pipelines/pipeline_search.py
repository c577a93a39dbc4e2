"""The best pipeline of given workers for a share of the micro-batches: where to cut it, and what to recompute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

from chameleon_ft.quantities import ROUNDING
from chameleon_ft.search.pipelines.bounds import CutPoints, PipelineBounds, PipelineEstimates
from chameleon_ft.search.placement.gradient_sync import SyncCost
from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.schedules import PipelineScheduler, PipelineSpec, TimedPipeline
from chameleon_ft.search.pipelines.worker_classes import Shape

__all__ = ["PipelineSearch", "synced_s"]

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
        self._models: dict[tuple[SyncCost, float], PipelineBounds] = {}
        self._scheduled: dict[tuple[Shape, int], dict[PipelineSpec, TimedPipeline]] = {}
        self.bounds = self.bounds_with(SyncCost())
        self.estimates, *_ = self.estimates_with(SyncCost())

    def bounds_with(self, sync: SyncCost) -> PipelineBounds:
        """Bounds on pipelines that then reduce their gradients."""
        return self._model(sync, 0.0)

    def estimates_with(self, sync: SyncCost) -> list[PipelineBounds]:
        """Estimates of pipelines that then reduce their gradients, with more room and less; bounds come last."""
        return [
            self._model(sync, in_flight_share)
            for in_flight_share in (_IN_FLIGHT_SHARES if self.scheduler.stages.limited else (0.0,))
        ]

    def best(self, shape: Shape, micro_batches: int, sync: SyncCost = SyncCost()) -> tuple[float, TimedPipeline | None]:  # noqa: B008 - frozen
        """Seconds, gradient sync included, and the pipeline of least time over its cuts and options; None if none fits.

        A complete search tries all of them, others the few with the least estimates.
        """
        most = self.scheduler.spent + _EFFORT * self._options.effort
        if self._options.complete:
            return self._best_of_all(shape, micro_batches, self.bounds_with(sync), most)
        best: tuple[float, TimedPipeline | None] = math.inf, None
        for bounds in self.estimates_with(sync):
            is_spent = best[1] is not None and self.scheduler.spent > most
            if is_spent or best[0] <= bounds.least_s(shape, micro_batches) * (1 + _GOOD_ENOUGH_GAP):
                break
            without_gain = 0
            for cut_points, (estimate_s, options) in self._candidates(shape, micro_batches, bounds):
                if estimate_s < best[0] * (1 - (_LEAST_GAIN if sync == SyncCost() else -_SIMILAR)):
                    found = self._better(best, PipelineSpec(shape, cut_points, options, micro_batches), bounds)
                    without_gain = 0 if found is not best else without_gain + 1
                    best = found
                if without_gain == _PATIENCE or (best[1] is not None and self.scheduler.spent > most):
                    break
        return best

    @staticmethod
    def specs(
        shape: Shape, micro_batches: int, bounds: PipelineBounds, limit_s: float
    ) -> Iterator[tuple[float, PipelineSpec]]:
        """All cuts with all options, and their bounds up to a limit, the least first."""
        found: list[tuple[float, CutPoints, tuple[int, ...]]] = []
        for cut_points in bounds.cuts(shape, micro_batches, limit_s=limit_s).each():
            for options in product(*bounds.stages.options_of(shape, cut_points)):
                own_s = bounds.bound_s(shape, cut_points, micro_batches, options)
                if own_s <= limit_s * (1 + ROUNDING):
                    found.append((own_s, cut_points, options))
        for own_s, cut_points, options in sorted(found):
            yield own_s, PipelineSpec(shape, cut_points, options, micro_batches)

    def similar(self, timed: TimedPipeline) -> list[TimedPipeline]:
        """The pipeline, and others of its shape and share with other cuts that take hardly longer, fastest first.

        Of those that were scheduled; gradient sync may make one of them the better choice.
        """
        spec = timed.spec
        known = self._scheduled.get((spec.shape, spec.micro_batches), {})
        others = [each for each in known.values() if each.cut_points != timed.cut_points]
        close = (each for each in others if each.program_s <= timed.program_s * (1 + _SIMILAR))
        return [timed, *sorted(close, key=lambda each: each.program_s)[: _MAX_SIMILAR - 1]]

    def _best_of_all(
        self, shape: Shape, micro_batches: int, bounds: PipelineBounds, most: float
    ) -> tuple[float, TimedPipeline | None]:
        best: tuple[float, TimedPipeline | None] = math.inf, None
        for cut_points, (_, options) in self._candidates(shape, micro_batches, bounds):
            best = self._better(best, PipelineSpec(shape, cut_points, options, micro_batches), bounds)
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
    def _candidates(
        shape: Shape, micro_batches: int, bounds: PipelineBounds
    ) -> Iterator[tuple[CutPoints, tuple[float, tuple[int, ...]]]]:
        """Cuts, each with some choices of options and their estimates."""
        for cut_points in bounds.candidates(shape, micro_batches, far=True):
            yield from ((cut_points, chosen) for chosen in bounds.chosen(shape, cut_points, micro_batches))

    def _better(
        self, best: tuple[float, TimedPipeline | None], spec: PipelineSpec, bounds: PipelineBounds
    ) -> tuple[float, TimedPipeline | None]:
        timed = self.scheduler.scheduled(spec, effort=self._options.look_effort)
        if timed is None:
            return best
        self._scheduled.setdefault((spec.shape, spec.micro_batches), {})[spec] = timed
        own_s = synced_s(timed, bounds)
        return (own_s, timed) if own_s < best[0] else best

    def _model(self, sync: SyncCost, in_flight_share: float) -> PipelineBounds:
        if (sync, in_flight_share) not in self._models:
            stages = self.scheduler.stages
            self._models[sync, in_flight_share] = (
                PipelineEstimates(stages, sync, in_flight_share=in_flight_share)
                if in_flight_share
                else PipelineBounds(stages, sync)
            )
        return self._models[sync, in_flight_share]


def synced_s(timed: TimedPipeline, bounds: PipelineBounds) -> float:
    """Seconds until the program has ended and every stage has reduced its gradients as `bounds` has it."""
    return max(timed.program_s, float((bounds.sync_s_of(timed.cut_points) + timed.ends_s).max()))
