"""Which pipelines, how many of each, with which share of the micro-batches: so that the last of them ends first.

Pipelines do not wait for each other, so a step takes as long as its slowest. In a time T a pipeline of some shape
finishes at most so many micro-batches, and the best mix of shapes is a knapsack; the least T at which it holds all
micro-batches is found by bisection. With the bounds on pipelines for their times, that T is a bound on every plan. The
pipelines of the mix are then scheduled, their times take the place of their bounds, and the knapsack is solved again,
as in A*: when the best mix has scheduled pipelines only, none is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.quantities import ROUNDING
from chameleon_ft.search.placement.gradient_sync import SyncCost
from chameleon_ft.search.mixes.knapsack import BoundedMix, Size, best_mix
from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.pipeline_search import PipelineSearch
from chameleon_ft.search.pipelines.schedules import TimedPipeline
from chameleon_ft.search.mixes.shapes import shapes_of, size_of
from chameleon_ft.search.pipelines.worker_classes import Shape

__all__ = ["MixSearch", "Share", "TimedMix"]

# Relative precision of a bisection when the search is not to be complete.
_COARSE_PRECISION: Final = 2e-4
# Longer than any step.
_LONGEST_STEP_S: Final = 1e300
# The first time that a search tries after zero.
_SMALLEST_STEP_S: Final = 1e-9
# With limited effort, expensive pipelines are left out if that makes the step no longer than by this factor.
_TOLERATED_SLOWDOWN: Final = 1.02
# With limited effort, mixes in a row without an improvement that end a search.
_PATIENCE: Final = 2


@dataclass(frozen=True, slots=True)
class Share:
    """`count` pipelines of a shape, each with `micro_batches`."""

    shape: Shape
    micro_batches: int
    count: int


@dataclass(frozen=True, slots=True)
class TimedMix:
    """A mix of scheduled pipelines with how many there are of each, and the seconds that the slowest takes."""

    pipelines: tuple[tuple[TimedPipeline, int], ...]
    time_s: float


class MixSearch:
    """The search over mixes of pipelines.

    Args:
        pipelines: cut and schedule them, with split and with fused backward; each pipeline takes what is faster.
        counts: workers of each class.
        micro_batches: of the global batch.
        work_s: seconds of the step if no worker were ever idle.
        options: of the search.
        sync: what gradient sync adds to each stage at least.
        pipeline_range: fewest and most pipelines side by side; None for any number.
        shapes: of pipelines; None for all.

    Attributes:
        shapes: of pipelines that are searched.
        all_shapes: whether every order of classes in a pipeline is looked at.
        complete: whether the search has ended because no mix can be better than the best of those it has yielded.
    """

    def __init__(
        self,
        pipelines: Sequence[PipelineSearch],
        counts: tuple[int, ...],
        micro_batches: int,
        work_s: float,
        options: SearchOptions,
        *,
        sync: SyncCost = SyncCost(),  # noqa: B008 - frozen
        pipeline_range: tuple[int, int] | None = None,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        self.pipelines = pipelines
        self.pipeline_range = pipeline_range
        self.sync = sync
        self.complete = False
        self._micro_batches = micro_batches
        self._work_s = work_s
        self._options = options
        self._precision = ROUNDING / 10 if options.complete else _COARSE_PRECISION
        self._counts = counts
        self.shapes, self.all_shapes = shapes_of(self._counts, pipelines[0].scheduler.stages.num_layers)
        if shapes is not None:
            self.shapes, self.all_shapes = tuple(shapes), False
        elif pipeline_range is not None:
            # Every other pipeline has a worker at least.
            self.shapes = tuple(shape for shape in self.shapes if len(shape) <= sum(counts) - pipeline_range[0] + 1)
        self._sizes = {shape: size_of(shape, len(counts)) for shape in self.shapes}
        self._known: dict[tuple[Shape, int], tuple[float, TimedPipeline | None]] = {}
        self._scheduled_s: dict[Shape, dict[int, float]] = {}
        self._bound: tuple[float, list[Share]] | None = None

    def bound_s(self) -> float:
        """Seconds below which no mix can be; infinite if memory allows none. To be asked before `mixes`."""
        return self._bounded()[0]

    def reaches(self, time_s: float) -> bool:
        """Whether a mix may take less than `time_s`."""
        if time_s == math.inf:
            return self.bound_s() < math.inf
        return self._at(time_s * (1 - ROUNDING), bounding=True)[0] >= self._micro_batches

    def mixes(self, bound_s: float, upper_s: float = math.inf) -> Iterator[TimedMix]:
        """Mixes whose times are between a bound and a time that is to be beaten, each better than nearly all before."""
        if not self._options.complete:
            self.shapes = self._affordable_shapes(bound_s)
        low, best_s, without_gain = bound_s, upper_s, 0
        most = self._spent() + self._options.effort
        first = True
        while first or self._spent() < most:
            found = self._next(low, best_s)
            if found is None:
                self.complete = self._options.complete
                return
            low, mix = found
            is_new, timed = self._timed(mix)
            if timed is None:
                continue
            first = False
            yield timed
            if not is_new or timed.time_s <= low * (1 + ROUNDING):
                self.complete = self._options.complete
                return
            without_gain = 0 if timed.time_s < best_s else without_gain + 1
            if without_gain == _PATIENCE and not self._options.complete:
                return
            best_s = min(best_s, timed.time_s)

    def _spent(self) -> int:
        return sum(each.scheduler.spent for each in self.pipelines)

    def _bounded(self) -> tuple[float, list[Share]]:
        if self._bound is None:
            self._bound = self._least(self._work_s, math.inf, bounding=True) or (math.inf, [])
        return self._bound

    def _next(self, low: float, best_s: float) -> tuple[float, list[Share]] | None:
        """A lower bound on all mixes by what is known so far, and the best mix; None if not below `best_s`."""
        found = self._least(low, best_s * (1 - ROUNDING), bounding=False)
        return None if found is None else (found[0], self._trimmed(found[1]))

    def _least(self, low: float, high: float, *, bounding: bool) -> tuple[float, list[Share]] | None:
        """The least time from `low` to `high` in which all can be finished, from below, and the mix.

        By galloping and bisection; None where there is none.
        """
        total, mix = self._at(low, bounding=bounding)
        if total >= self._micro_batches:
            return low, mix
        if high == math.inf:
            if self._at(_LONGEST_STEP_S, bounding=bounding)[0] < self._micro_batches:
                return None
            high, share = low, 0.02
            while total < self._micro_batches:
                low, high, share = high, high * (1 + share) or _SMALLEST_STEP_S, min(1.0, 2 * share)
                total, mix = self._at(high, bounding=bounding)
        else:
            total, mix = self._at(high, bounding=bounding)
            if total < self._micro_batches:
                return None
        while high - low > self._precision * high:
            middle = (low + high) / 2
            total, found = self._at(middle, bounding=bounding)
            if total >= self._micro_batches:
                high, mix = middle, found
            else:
                low = middle
        return low, mix

    def _affordable_shapes(self, time_s: float) -> tuple[Shape, ...]:
        """Return the shapes that are cheap to schedule, or all shapes if the cheap ones are not fast enough."""
        affordable = tuple(
            shape
            for shape in self.shapes
            if not self._options.is_expensive(len(shape), self._most(shape, time_s, quick=True))
        )
        if affordable == self.shapes or self._at(time_s * _TOLERATED_SLOWDOWN, affordable)[0] < self._micro_batches:
            return self.shapes
        return affordable

    def _at(
        self, time_s: float, shapes: Sequence[Shape] | None = None, *, bounding: bool = False
    ) -> tuple[int, list[Share]]:
        """The most micro-batches that a mix may finish in `time_s`, and the mix.

        With `bounding`, a number that no mix passes, and a mix that comes close to it.
        """
        counts = {shape: self._most(shape, time_s, quick=True) for shape in (self.shapes if shapes is None else shapes)}
        # Bounds that take longer to work out are needed only of shapes that a best mix is made of.
        known: set[Shape] = set()
        while True:
            best: dict[Size, Shape] = {}
            for shape, count in counts.items():
                size = self._sizes[shape]
                if count > (counts[best[size]] if size in best else 0):
                    best[size] = shape
            found = best_mix({size: counts[shape] for size, shape in best.items()}, self._counts, self.pipeline_range)
            total = found.bound if bounding else self._num_finished(found, best, counts)
            if total < self._micro_batches:
                return total, []
            unknown = {best[size] for size in found.made_of} - known
            if not unknown:
                return total, [Share(best[size], counts[best[size]], number) for size, number in found.mix.items()]
            known |= unknown
            counts.update({shape: self._most(shape, time_s, quick=False) for shape in unknown})

    @staticmethod
    def _num_finished(found: BoundedMix, best: dict[Size, Shape], counts: dict[Shape, int]) -> int:
        return sum(counts[best[size]] * number for size, number in found.mix.items())

    def _most(self, shape: Shape, time_s: float, *, quick: bool) -> int:
        """The most micro-batches that a pipeline may finish: fewer than one that was scheduled and took longer."""
        enough = self._micro_batches
        for count, own_s in self._scheduled_s.get(shape, {}).items():
            if own_s > time_s:
                enough = min(enough, count - 1)
        most = 0
        for each in self.pipelines:
            if most == enough or (most and each.bounds.quick_s(shape, most + 1) > time_s * (1 + ROUNDING)):
                continue
            own = each.bounds.most(shape, time_s, enough, quick=True)
            if own > most and not quick:
                own = each.bounds_with(self.sync).most(shape, time_s, own, quick=False)
            most = max(most, own)
        return most

    def _trimmed(self, mix: Sequence[Share]) -> list[Share]:
        """The mix without the micro-batches that are too many; the pipelines that would end last give them up."""
        surplus = sum(share.micro_batches * share.count for share in mix) - self._micro_batches
        shares = {(share.shape, share.micro_batches): share.count for share in mix}
        while surplus > 0:
            shape, count = max(shares, key=lambda key: (self._time_s(*key), key))
            pipelines = shares.pop((shape, count))
            fewer = min(pipelines, surplus)
            if pipelines > fewer:
                shares[shape, count] = pipelines - fewer
            if count > 1:
                shares[shape, count - 1] = shares.get((shape, count - 1), 0) + fewer
            surplus -= fewer
        return [Share(shape, count, pipelines) for (shape, count), pipelines in sorted(shares.items())]

    def _time_s(self, shape: Shape, micro_batches: int) -> float:
        known = self._known.get((shape, micro_batches))
        return self._quick_s(shape, micro_batches)[0][0] if known is None else known[0]

    def _quick_s(self, shape: Shape, micro_batches: int) -> list[tuple[float, int]]:
        """Quick bounds with split and with fused backward, by number of `pipelines`, the least first."""
        bounds = (each.bounds_with(self.sync) for each in self.pipelines)
        return sorted((own.quick_s(shape, micro_batches), number) for number, own in enumerate(bounds))

    def _best(self, shape: Shape, micro_batches: int) -> tuple[float, TimedPipeline | None]:
        best: tuple[float, TimedPipeline | None] = math.inf, None
        for bound_s, number in self._quick_s(shape, micro_batches):
            if bound_s < best[0]:
                best = min(best, self.pipelines[number].best(shape, micro_batches, self.sync), key=lambda own: own[0])
        return best

    def _timed(self, mix: Sequence[Share]) -> tuple[bool, TimedMix | None]:
        """Whether any of the mix was not scheduled before, and the mix with schedules; None where it does not fit."""
        is_new, fits = False, True
        pipelines: list[tuple[TimedPipeline, int]] = []
        time_s = 0.0
        for share in mix:
            key = share.shape, share.micro_batches
            if key not in self._known:
                is_new = True
                self._known[key] = self._best(*key)
                self._scheduled_s.setdefault(share.shape, {})[share.micro_batches] = self._known[key][0]
            own_s, pipeline = self._known[key]
            if pipeline is None:
                fits = False
                continue
            time_s = max(time_s, own_s)
            pipelines.append((pipeline, share.count))
        return is_new, TimedMix(tuple(pipelines), time_s) if fits else None
