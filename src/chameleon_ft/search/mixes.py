"""Search for the mix of pipelines, with their numbers and shares of the micro-batches, whose slowest ends earliest.

Pipelines do not wait for each other, so a step takes as long as its slowest pipeline. In a time T a pipeline of some
shape finishes a limited number of micro-batches, so the best mix of shapes is a knapsack; bisection finds the least T
at which it holds all micro-batches. If pipelines count with their bounds, that T is a bound on every plan. The
pipelines of the mix are then scheduled, their times replace their bounds, and the knapsack is solved again, as in A*:
once the best mix has only scheduled pipelines, no mix is better.

If gradients are reduced, layouts of pipelines of about equal depth, which can reduce theirs together, are tried first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations
from typing import Final, TypeAlias

from chameleon_ft.quantities import ROUNDING
from chameleon_ft.search.bounds import SyncCost, SyncLowerBound
from chameleon_ft.search.knapsack import Size, best_mix
from chameleon_ft.search.pipelines import BestPipeline, PipelineSearch, TimedPipeline
from chameleon_ft.search.result import SearchOptions
from chameleon_ft.search.worker_classes import Shape, arrangements
from chameleon_ft.workload import Workload

# Relative precision of a bisection in a search that need not be complete.
_COARSE_PRECISION: Final = 2e-4
# Longer than any step.
_LONGEST_STEP_S: Final = 1e300
# The first time that a search tries after zero.
_SMALLEST_STEP_S: Final = 1e-9
# With limited effort, expensive pipelines are left out if that makes the step no longer than by this factor.
_TOLERATED_SLOWDOWN: Final = 1.02
# With limited effort, mixes in a row without an improvement that end a search.
_PATIENCE: Final = 2
# Up to this many orders of classes in a pipeline, all are searched.
_ALL_SHAPES: Final = 3_000
# Beyond that, only pipelines of one class, and of two classes one after the other up to this depth.
_MIXED_DEPTH: Final = 6

_Shares: TypeAlias = dict[tuple[Shape, int], int]
"""The number of pipelines of a shape with a share of the micro-batches."""


@dataclass(frozen=True, slots=True)
class TimedMix:
    """A mix of scheduled pipelines with the number of each, and the seconds of the slowest."""

    pipelines: tuple[tuple[TimedPipeline, int], ...]
    time_s: float


class MixSearch:
    """The search over mixes of pipelines.

    Args:
        pipelines: cut and schedule pipelines, with split and with fused backward; the faster one counts.
        counts: workers of each class.
        micro_batches: size of the global batch.
        work_s: seconds of the step if no worker were ever idle.
        sync: least seconds of gradient sync that follow each stage.
        pipeline_range: fewest and most pipelines side by side; None for any number.
        shapes: shapes of the pipelines that are searched; None for all.

    Attributes:
        complete: the search has ended because no mix can be better than the best of those it has yielded.
    """

    def __init__(
        self,
        pipelines: Sequence[PipelineSearch],
        counts: tuple[int, ...],
        micro_batches: int,
        work_s: float,
        options: SearchOptions,
        *,
        sync: SyncCost = SyncCost(),
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
        self.shapes, _ = shapes_of(counts, pipelines[0].scheduler.stages.num_layers)
        if shapes is not None:
            self.shapes = tuple(shapes)
        elif pipeline_range is not None:
            # Every other pipeline has at least one worker.
            self.shapes = tuple(shape for shape in self.shapes if len(shape) <= sum(counts) - pipeline_range[0] + 1)
        self._sizes: dict[Shape, Size] = {
            shape: tuple(shape.count(kind) for kind in range(len(counts))) for shape in self.shapes
        }
        self._scheduled: dict[Shape, dict[int, BestPipeline]] = {shape: {} for shape in self.shapes}

    @cached_property
    def bound_s(self) -> float:
        """Lower bound, in seconds, on all mixes; infinite if memory allows none. Read it before `mixes`."""
        found = self._least(self._work_s, math.inf, bounding=True)
        return math.inf if found is None else found[0]

    def reaches(self, time_s: float) -> bool:
        """Return whether a mix may take less than `time_s`."""
        if time_s == math.inf:
            return self.bound_s < math.inf
        return self._at(time_s * (1 - ROUNDING), bounding=True) is not None

    def mixes(self, bound_s: float, upper_s: float = math.inf) -> Iterator[TimedMix]:
        """Yield mixes with times between a bound and a time to beat, each better than nearly all before.

        Each mix is the best by current knowledge: schedules of some pipelines, and bounds on the others.
        """
        if not self._options.complete:
            self.shapes = self._affordable_shapes(bound_s)
        low_s, best_s, without_gain = bound_s, upper_s, 0
        most = self._spent() + self._options.effort
        first = True
        while first or self._spent() < most:
            found = self._least(low_s, best_s * (1 - ROUNDING))
            if found is None:
                self.complete = self._options.complete
                return
            low_s, shares = found[0], self._trimmed(found[1])
            is_new = any(share not in self._scheduled[shape] for shape, share in shares)
            timed = self._timed(shares)
            if timed is None:
                continue
            first = False
            yield timed
            if not is_new or timed.time_s <= low_s * (1 + ROUNDING):
                self.complete = self._options.complete
                return
            without_gain = 0 if timed.time_s < best_s else without_gain + 1
            if without_gain == _PATIENCE and not self._options.complete:
                return
            best_s = min(best_s, timed.time_s)

    def _spent(self) -> int:
        return sum(each.scheduler.spent for each in self.pipelines)

    def _least(self, low_s: float, high_s: float, *, bounding: bool = False) -> tuple[float, _Shares] | None:
        """Return the least time from `low_s` to `high_s` that finishes all micro-batches, from below, and the mix.

        By galloping and bisection; None if there is no such time.
        """
        shares = self._at(low_s, bounding=bounding)
        if shares is not None:
            return low_s, shares
        if high_s == math.inf:
            if self._at(_LONGEST_STEP_S, bounding=bounding) is None:
                return None
            high_s, share = low_s, 0.02
            while shares is None:
                low_s, high_s, share = high_s, high_s * (1 + share) or _SMALLEST_STEP_S, min(1.0, 2 * share)
                shares = self._at(high_s, bounding=bounding)
        else:
            shares = self._at(high_s, bounding=bounding)
            if shares is None:
                return None
        while high_s - low_s > self._precision * high_s:
            middle_s = (low_s + high_s) / 2
            found = self._at(middle_s, bounding=bounding)
            if found is None:
                low_s = middle_s
            else:
                high_s, shares = middle_s, found
        return low_s, shares

    def _affordable_shapes(self, time_s: float) -> tuple[Shape, ...]:
        """Return the shapes that are cheap to schedule, or all shapes if the cheap ones are not fast enough."""
        affordable = tuple(
            shape
            for shape in self.shapes
            if not self._options.is_expensive(len(shape), self._most(shape, time_s, quick=True))
        )
        if affordable == self.shapes or self._at(time_s * _TOLERATED_SLOWDOWN, affordable) is None:
            return self.shapes
        return affordable

    def _at(self, time_s: float, shapes: Sequence[Shape] | None = None, *, bounding: bool = False) -> _Shares | None:
        """Return a mix that may finish all micro-batches in `time_s`, or more; None if there is none.

        With `bounding`, None only if no mix can, and otherwise a mix that comes close.
        """
        most = {shape: self._most(shape, time_s, quick=True) for shape in (self.shapes if shapes is None else shapes)}
        # Only the shapes of a best mix need the slower bounds.
        checked: set[Shape] = set()
        while True:
            best: dict[Size, Shape] = {}
            for shape, count in most.items():
                size = self._sizes[shape]
                if count > (most[best[size]] if size in best else 0):
                    best[size] = shape
            found = best_mix({size: most[shape] for size, shape in best.items()}, self._counts, self.pipeline_range)
            finished = sum(most[best[size]] * number for size, number in found.mix.items())
            if (found.bound if bounding else finished) < self._micro_batches:
                return None
            unchecked = {best[size] for size in found.made_of} - checked
            if not unchecked:
                return {(best[size], most[best[size]]): number for size, number in found.mix.items()}
            checked |= unchecked
            most.update({shape: self._most(shape, time_s, quick=False) for shape in unchecked})

    def _most(self, shape: Shape, time_s: float, *, quick: bool) -> int:
        """Return the most micro-batches that a pipeline may finish: fewer than any scheduled one that took longer."""
        slow = (count - 1 for count, (own_s, _) in self._scheduled[shape].items() if own_s > time_s)
        enough = min(slow, default=self._micro_batches)
        most = 0
        for each in self.pipelines:
            if most == enough or (most and each.bounds.quick_s(shape, most + 1) > time_s * (1 + ROUNDING)):
                continue
            own = each.bounds.most(shape, time_s, enough, quick=True)
            if own > most and not quick:
                own = each.bounds_with(self.sync).most(shape, time_s, own, quick=False)
            most = max(most, own)
        return most

    def _trimmed(self, mix: Mapping[tuple[Shape, int], int]) -> _Shares:
        """Return the mix without its surplus micro-batches, which the pipelines that end last give up.

        One that gives up its last is dropped, if as many are left as there are to be holders of each layer.
        """
        shares = dict(mix)
        droppable = sum(shares.values()) - self._options.min_holders
        surplus = sum(share * count for (_, share), count in shares.items()) - self._micro_batches
        while surplus > 0:
            given_up_by = (key for key in shares if key[1] > 1 or droppable > 0)
            shape, share = max(given_up_by, key=lambda key: (self._time_s(*key), key))
            count = shares.pop((shape, share))
            fewer = min(count, surplus)
            if share == 1:
                fewer = min(fewer, droppable)
                droppable -= fewer
            if count > fewer:
                shares[shape, share] = count - fewer
            if share > 1:
                shares[shape, share - 1] = shares.get((shape, share - 1), 0) + fewer
            surplus -= fewer
        return dict(sorted(shares.items()))

    def _time_s(self, shape: Shape, share: int) -> float:
        """Return the seconds of the schedule if there is one, else a bound."""
        known = self._scheduled[shape].get(share)
        return self._quick_s(shape, share)[0][0] if known is None else known[0]

    def _quick_s(self, shape: Shape, share: int) -> list[tuple[float, int]]:
        """Return quick bounds with split and with fused backward, by number of `pipelines`, the least first."""
        bounds = (each.bounds_with(self.sync) for each in self.pipelines)
        return sorted((own.quick_s(shape, share), number) for number, own in enumerate(bounds))

    def _timed(self, shares: _Shares) -> TimedMix | None:
        """Return the mix with schedules; None if it does not fit."""
        pipelines: list[tuple[TimedPipeline | None, int]] = []
        time_s = 0.0
        for (shape, share), count in shares.items():
            known = self._scheduled[shape]
            if share not in known:
                best: BestPipeline = math.inf, None
                for bound_s, number in self._quick_s(shape, share):
                    if bound_s < best[0]:
                        own = self.pipelines[number].best(shape, share, self.sync)
                        best = min(best, own, key=lambda each: each[0])
                known[share] = best
            time_s = max(time_s, known[share][0])
            pipelines.append((known[share][1], count))
        fitting = tuple((timed, count) for timed, count in pipelines if timed is not None)
        return TimedMix(fitting, time_s) if len(fitting) == len(pipelines) else None


# A search asks for these once for every number of pipelines.
@lru_cache(maxsize=4)
def shapes_of(counts: tuple[int, ...], layers: int) -> tuple[tuple[Shape, ...], bool]:
    """Return the shapes to search for workers of each class, by depth, and whether these are all."""
    depths, by_class = range(1, min(sum(counts), layers) + 1), dict(enumerate(counts))
    if len(counts) == 1:
        return tuple((0,) * depth for depth in depths), True
    if sum(len(counts) ** depth for depth in depths) <= _ALL_SHAPES:
        return tuple(shape for depth in depths for shape in arrangements(by_class, depth)), True
    shapes = [(kind,) * depth for kind, count in enumerate(counts) for depth in range(1, min(count, layers) + 1)]
    for first, second in permutations(range(len(counts)), 2):
        for depth in range(2, min(layers, _MIXED_DEPTH) + 1):
            shapes += [
                (first,) * own + (second,) * (depth - own)
                for own in range(1, depth)
                if own <= counts[first] and depth - own <= counts[second]
            ]
    return tuple(shapes), False


# With up to this many workers, every depth is searched with every number of pipelines that there are workers for.
_ALL_NUMBERS: Final = 64


@dataclass(frozen=True, slots=True)
class EqualDepths:
    """Pipelines of one depth; workers that are left over are idle or make some pipelines one stage deeper.

    Attributes:
        depth: stages of most pipelines.
        number: how many pipelines there are.
        sync: the least that gradient sync takes with so many.
        pipelines: cuts and schedules them.
        estimate_s: estimated seconds of the step.
    """

    depth: int
    number: int
    sync: SyncCost
    pipelines: PipelineSearch
    estimate_s: float

    def shapes(self, *, mixed: bool) -> list[tuple[int, ...]]:
        """Return the shapes of the pipelines: of its depth, or also one stage deeper."""
        layers = self.pipelines.scheduler.stages.num_layers
        return [(0,) * depth for depth in range(self.depth, self.depth + (2 if mixed else 1)) if depth <= layers]


def promising_layouts(
    searches: Iterable[PipelineSearch],
    workers: int,
    min_sync: SyncLowerBound,
    options: SearchOptions,
    workload: Workload,
) -> list[EqualDepths]:
    """Return layouts of workers of one class by their estimate, the best first, without those that do not fit."""
    num_bytes = sum(layer.gradient_bytes for layer in workload.layers)
    layers = len(workload.layers)
    found: list[EqualDepths] = []
    for pipelines in searches:
        for depth in range(1, min(workers, layers) + 1):
            for number in _numbers(workers, depth, layers, workload.micro_batches):
                if number < options.min_holders:
                    continue
                sync = min_sync.of(number)
                estimate_s = _estimate_s(pipelines, depth, workload.micro_batches / number)
                estimate_s += sync.fixed_s + sync.per_byte_s * num_bytes / depth
                if estimate_s < math.inf:
                    found.append(EqualDepths(depth, number, sync, pipelines, estimate_s))
    return sorted(found, key=lambda layout: (layout.estimate_s, layout.depth, layout.number))


def _numbers(workers: int, depth: int, layers: int, micro_batches: int) -> range:
    """Return the numbers of pipelines of this depth to look at.

    If there are many workers, few of them are idle or in pipelines one stage deeper.
    """
    most = min(workers // depth, micro_batches)
    if workers <= _ALL_NUMBERS:
        return range(1, most + 1)
    fewest = workers // (depth + 1) if depth < layers else most
    return range(max(1, fewest, most - 1), most + 1)


def _estimate_s(pipelines: PipelineSearch, depth: int, share: float) -> float:
    """Return the estimate of the mean share, interpolated between whole numbers of micro-batches."""
    estimates, low = pipelines.estimates, math.floor(share)
    low_s = estimates.quick_s((0,) * depth, low)
    if share == low or low_s == math.inf:
        return low_s
    # Pipelines one stage deeper, of workers that are left over, take some of the work.
    return low_s + (share - low) * (estimates.quick_s((0,) * depth, low + 1) - low_s)
