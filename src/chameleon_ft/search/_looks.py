"""Looks at pipelines of a search: with which cut, and in what time."""

from __future__ import annotations

import math
from typing import Final

from chameleon_ft.search._bounds import PipelineBounds, Stops
from chameleon_ft.search._kinds import Shape
from chameleon_ft.search._timed import TimedPipeline, Timer

_ROUNDING: Final = 1e-9
# How close to its bound a cut is good enough in a search that is not complete.
_ENOUGH: Final = 0.005
# By how much a cut has to promise to be better to be looked at then.
_LEAST_GAIN: Final = 0.003


class Looks:
    """Chooses cuts for pipelines.

    Args:
        timer: schedules them.
        plain, recomputing: bounds of those that do not recompute, and of those that do, if there may be any.
        effort: of a look; None for hardly any, see `Timer.rough`.
        complete: whether all cuts are to be tried.
    """

    def __init__(
        self,
        timer: Timer,
        plain: PipelineBounds,
        recomputing: PipelineBounds | None,
        *,
        effort: int | None,
        complete: bool,
    ) -> None:
        self._timer = timer
        self._plain = plain
        self._recomputing = recomputing
        self._effort = effort
        self._complete = complete

    def best_cut(
        self, shape: Shape, micro_batches: int, upper_s: float = math.inf
    ) -> tuple[float, TimedPipeline | None]:
        """The least time of a pipeline over its cuts: over all of them in a complete search, else over a few.

        None where it takes longer than the time that goes with it: than `upper_s`, or for ever if it does not fit.
        """
        best: tuple[float, TimedPipeline | None] = math.inf, None
        for recompute, bounds in ((False, self._plain), (True, self._recomputing)):
            if bounds is None or (best[0] < math.inf and not self._complete):
                continue
            least_s = bounds.least_s(shape, micro_batches)
            enough_s = least_s * (1 + (_ROUNDING if self._complete else _ENOUGH))
            for stops in bounds.candidates(shape, micro_batches):
                if best[1] is None or best[0] > enough_s:
                    best = self._better(best, bounds, shape, stops, micro_batches, recompute, upper_s)
            if self._complete and best[0] > enough_s:
                for bound_s, stops in bounds.each(shape, micro_batches, best[0]):
                    if bound_s >= best[0] * (1 - _ROUNDING):
                        break
                    best = self._better(best, bounds, shape, stops, micro_batches, recompute)
        return best

    def _better(
        self,
        best: tuple[float, TimedPipeline | None],
        bounds: PipelineBounds,
        shape: Shape,
        stops: Stops,
        micro_batches: int,
        recompute: bool,
        upper_s: float = math.inf,
    ) -> tuple[float, TimedPipeline | None]:
        """`best`, or a cut that is better."""
        gain = _ROUNDING if self._complete else _LEAST_GAIN
        if best[1] is not None and bounds.bound_s(shape, stops, micro_batches) >= best[0] * (1 - gain):
            return best
        if self._effort is not None:
            timed = self._timer.sample(shape, stops, micro_batches, recompute=recompute, effort=self._effort)
        else:
            upper_s = min(upper_s, best[0])
            latest_s = upper_s - bounds.sync_s_of(stops)
            rough = self._timer.rough(shape, stops, micro_batches, recompute=recompute, latest_s=latest_s)
            if rough is None:
                return (upper_s, best[1])
            timed = rough
        own_s = with_sync_s(timed, bounds)
        return (own_s, timed) if own_s < best[0] else best


def with_sync_s(timed: TimedPipeline, bounds: PipelineBounds) -> float:
    """Seconds until the program has ended and every stage has reduced its gradients, waiting for nobody else."""
    synced_s = (bounds.sync_s_of(timed.stops) + timed.ends_s).max()
    return max(timed.program_s, float(synced_s))
