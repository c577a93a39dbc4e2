"""Lower bounds on pipelines: seconds that no order of operations beats, for the best cut and for a given one.

Going from the last stage of a pipeline to the first, three times are kept for the stages from some layer on, counted
from when the first activation comes in there, each the least over all cuts:

    first: the gradient of a single micro-batch has gone out again
    returned: the last gradient of m micro-batches has gone out again
    ended: every worker has computed everything and has reduced its gradients

A stage of f, b, w seconds (F; B or I; W), with messages of c seconds to the next stage and s seconds of gradient sync,
that has room for K micro-batches in flight and for V that wait for their W, gives

    first    = f + 2 c + first' + b
    idle     = max(0, f + 2 c + first' - min(m, K) f)
    rounds   = ceil(m / K)
    returned = max(m (f + b) + max(0, m - V) w + idle, f + 2 c + returned' + b,
                   rounds first + (m - rounds - (rounds - 1) (K - 1)) d)
    ended    = max(m (f + b + w) + idle + s, returned + w + s, f + c + ended')

where ' is of the stages after it, and d are the seconds between two gradients that leave the last stage. Until the
first gradient comes back a stage runs no more than K forwards, and then it waits (idle). When its last I has ended, at
most V of its W are left. When it starts the F of the first micro-batch of a round, all but K - 1 of those of earlier
rounds are back. Likewise for bytes: while an operation runs, all other micro-batches have only the memory that it
leaves.

K and V follow from memory: to recompute more layers of the stage makes b longer and K larger, and of all these options
the best counts, each of the three times for itself (`quick_s`). Together they may be too good to be true: `first` of
stages that recompute nothing, `returned` of such that do. So `least_s` is the least limit on the step for which there
still is a pipeline of stages that do not exceed it. With K = P that is the bubble of ZB-H1, (P - 1) (f + b - w) (Qi et
al., Zero Bubble Pipeline Parallelism, 2023). Nothing is assumed about the order of operations, so the bounds hold for
schedules with fewer micro-batches in flight than 1F1B too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from chameleon_ft.quantities import SUM_ROUNDING
from chameleon_ft.schedule.records import Floats, Integers
from chameleon_ft.search.pipelines.cuts import Choice, Cuts
from chameleon_ft.search.placement.gradient_sync import SyncCost
from chameleon_ft.search.pipelines.stages import Stages, gradient_bytes, timeless_gradient_bytes
from chameleon_ft.search.pipelines.worker_classes import Shape

if TYPE_CHECKING:
    from chameleon_ft.search._kernels.pipeline_bounds import Pipeline

__all__ = ["CutPoints", "PipelineBounds", "PipelineEstimates"]

CutPoints: TypeAlias = tuple[int, ...]
"""The layer after the last one of each stage of a pipeline, first stage to last."""

# Relative precision of bounds and of options that are found by bisection.
_PRECISION: Final = 2e-3
# By how much the bound of a cut may exceed the least one. All up to `_BALANCED_SLACK` are tried, larger ones only if no
# cut is found.
_SLACKS: Final = (1e-9, 0.01, 0.04, math.inf)
_BALANCED_SLACK: Final = 0.04
# Limits under which options are chosen, as shares above the least bound.
_LIMITS: Final = tuple(0.01 * 1.5**step for step in range(12))
# Numbers that the remembered times of stages may have together.
_REMEMBERED: Final = 8_000_000


class _Rows(NamedTuple):
    """Arrays that `fill_bounds` fills in: float64 [stages + 1, L + 1] each."""

    first_s: Floats
    returned_s: Floats
    ended_s: Floats


class PipelineBounds:
    """Lower bounds on pipelines of `stages`, gradient sync included."""

    def __init__(self, stages: Stages, sync: SyncCost) -> None:
        self.stages = stages
        self.sync = sync
        self.tables = stages.tables
        self._rows: dict[tuple[Shape, int, int], _Rows] = {}
        self._limited_rows: dict[tuple[Shape, int, int], _Rows] = {}
        self._limit_s = math.inf
        self._remembered = 0
        self._quick_s: dict[tuple[Shape, int, int], list[float]] = {}
        self._known_s: dict[tuple[Shape, int], tuple[float, float]] = {}
        self._last_most: dict[tuple[Shape, bool], int] = {}
        edge = np.full(stages.num_layers + 1, np.inf)
        edge[-1] = 0.0
        self._end = _Rows(edge, edge, edge)

    @cached_property
    def sync_s(self) -> Floats:
        """Seconds of gradient sync by start and stop; a stage without gradients has nothing to wait for."""
        sync, workload = self.sync, self.stages.costs.workload
        num_bytes = gradient_bytes(workload)
        beyond = np.maximum(0.0, num_bytes - timeless_gradient_bytes(workload) - sync.inside_bytes)
        sync_s = sync.fixed_s + sync.per_byte_s * num_bytes + sync.beyond_s * beyond
        return np.where(num_bytes > 0, sync_s, 0.0)

    def quick_s(self, shape: Shape, micro_batches: int) -> float:
        """As `least_s`, or less, and known much sooner: each time is minimized for itself."""
        kind, count, after = _front(shape)
        known = self._quick_s.setdefault((after, kind, micro_batches), [])
        if count >= len(known):
            known[:] = self._rows_of(after, kind, count, micro_batches).ended_s[:, 0].tolist()
        return known[count]

    def least_s(self, shape: Shape, micro_batches: int) -> float:
        """Seconds below which no pipeline of this shape can be; infinite if none fits."""
        high_s = self.quick_s(shape, micro_batches)
        share = _PRECISION
        while high_s < math.inf and not self.holds(shape, micro_batches, high_s):
            high_s, share = high_s * (1 + share), 2 * share
        low_s, high_s = self._known_range_s(shape, micro_batches)
        while low_s * (1 + _PRECISION) < high_s < math.inf:
            self.holds(shape, micro_batches, (low_s + high_s) / 2)
            low_s, high_s = self._known_range_s(shape, micro_batches)
        return low_s

    def holds(self, shape: Shape, micro_batches: int, limit_s: float) -> bool:
        """Whether there may be a pipeline of this shape that takes no longer than a limit."""
        low_s, high_s = self._known_range_s(shape, micro_batches)
        if limit_s < low_s:
            return False
        # Of times that differ by less, it is not worth while to know which can be reached.
        if limit_s >= high_s or (low_s * (1 + _PRECISION) >= high_s and limit_s > low_s):
            return True
        kind, count, after = _front(shape)
        rows = self._rows_of(after, kind, count, micro_batches, limit_s)
        found = bool(rows.ended_s[count, 0] <= limit_s)
        self._known_s[shape, micro_batches] = (low_s, limit_s) if found else (limit_s, high_s)
        return found

    def _known_range_s(self, shape: Shape, micro_batches: int) -> tuple[float, float]:
        """The longest time that is known to be too short, and the shortest one that is known to hold a pipeline."""
        key = shape, micro_batches
        if key not in self._known_s:
            quick_s = self.quick_s(*key)
            self._known_s[key] = quick_s, math.inf if self.stages.limited else quick_s
        return self._known_s[key]

    def most(self, shape: Shape, time_s: float, enough: int, *, quick: bool) -> int:
        """The most micro-batches, up to `enough`, that the bound, or the quick one, does not rule out; zero if it rules
        out one."""
        # Where memory forbids it, it takes infinitely long.
        limit_s = min(time_s * (1 + SUM_ROUNDING), sys.float_info.max)
        at = self._last_most.get((shape, quick), enough)
        found = _last_fitting(
            lambda count: self.quick_s(shape, count) <= limit_s if quick else self.holds(shape, count, limit_s),
            enough,
            at,
        )
        self._last_most[shape, quick] = found
        return found

    def bound_s(self, shape: Shape, cut_points: CutPoints, micro_batches: int, options: Sequence[int]) -> float:
        """Seconds below which no order of operations can be on this cut with these options; infinite if one is
        negative."""
        return self._cut_s(shape, cut_points, micro_batches, math.inf, np.array(options))

    def chosen(self, shape: Shape, cut_points: CutPoints, micro_batches: int) -> list[tuple[float, tuple[int, ...]]]:
        """Options of the stages of this cut for which the bound is about the least, and the bound for these.

        In a step that may take longer stages recompute less, so that those in front need to hold fewer micro-batches,
        but their gradients take longer. No schedule comes near to the bound with as little recomputation as that, so
        options with which each stage for itself ends first are chosen too. None where a stage does not fit.
        """

        def within(limit_s: float) -> tuple[int, ...] | None:
            """The options chosen in a step up to a limit; None if a stage has none."""
            options = np.full(len(shape), -1)
            own_s = self._cut_s(shape, cut_points, micro_batches, limit_s, options)
            return tuple(options.tolist()) if own_s < math.inf else None

        by_stage = within(math.inf)
        if by_stage is None:
            return []
        found = {by_stage: self.bound_s(shape, cut_points, micro_batches, by_stage)}
        least = within(found[by_stage])
        if self.stages.limited and least != by_stage:
            least_s = self.quick_s(shape, micro_batches)
            for options in (least, *(within(least_s * (1 + slack)) for slack in _LIMITS)):
                if options is not None and options not in found:
                    found[options] = self.bound_s(shape, cut_points, micro_batches, options)
        best = min(found, key=found.__getitem__)
        return [(found[each], each) for each in dict.fromkeys((best, by_stage))]

    def _cut_s(
        self, shape: Shape, cut_points: CutPoints, micro_batches: int, limit_s: float, options: Integers
    ) -> float:
        from chameleon_ft.search._kernels.pipeline_bounds import cut_s

        return cut_s(self.tables, np.array(shape), np.array(cut_points), micro_batches, limit_s, self.sync_s, options)

    def candidates(self, shape: Shape, micro_batches: int, *, far: bool = False) -> Iterator[CutPoints]:
        """Cuts of the least bound, or of one little larger: with stages as equal as can be, or filled.

        Some of any bound come last if no schedule may come near to the least one, `far`.
        """
        least_s = self.least_s(shape, micro_batches)
        if least_s == math.inf:
            return
        found: list[CutPoints] = []
        for slack in _SLACKS:
            cuts = self.cuts(shape, micro_batches, limit_s=least_s * (1 + slack))
            # Nearly equal stages, or small ones first, have room in memory where the least bound would have them full.
            for choice in (Choice.NEAREST, Choice.EARLIEST) if found else Choice:
                cut_points = cuts.greedy(choice)
                if cut_points is not None and cut_points not in found:
                    found.append(cut_points)
                    yield cut_points
            if slack >= _BALANCED_SLACK and found and not far:
                return

    def nearest(self, shape: Shape, micro_batches: int, wishes: Sequence[int], *, slack: float) -> CutPoints | None:
        """A cut whose stages stop near to where it is wished, with a bound that is little above the least."""
        least_s = self.least_s(shape, micro_batches)
        if least_s == math.inf:
            return None
        return self.cuts(shape, micro_batches, wishes, limit_s=least_s * (1 + slack)).greedy(Choice.NEAREST)

    def cuts(self, shape: Shape, micro_batches: int, wishes: Sequence[int] = (), *, limit_s: float) -> Cuts:
        """The cuts of a shape whose bounds are within a limit."""
        limit_s = min(limit_s * (1 + SUM_ROUNDING), sys.float_info.max)
        return Cuts(
            self.tables, self._kernel_pipeline(shape, micro_batches, limit_s), limit_s, self.stages.speeds, wishes
        )

    def sync_s_of(self, cut_points: CutPoints) -> Floats:
        """Seconds of gradient sync of each stage, as the bounds have it."""
        found: Floats = self.sync_s[[0, *cut_points[:-1]], list(cut_points)]
        return found

    def _kernel_pipeline(self, shape: Shape, micro_batches: int, limit_s: float) -> Pipeline:
        from chameleon_ft.search._kernels.pipeline_bounds import Pipeline

        after: list[_Rows] = []
        for position in range(1, len(shape) + 1):
            if position == len(shape):
                after.append(self._end)
                continue
            kind, count, behind = _front(shape[position:])
            rows = self._rows_of(behind, kind, count, micro_batches, limit_s)
            after.append(_Rows(*(each[count] for each in rows)))
        return Pipeline(
            np.array(shape), micro_batches, self.sync_s, *(np.stack(own) for own in zip(*after, strict=True))
        )

    def _rows_of(self, after: Shape, kind: int, count: int, micro_batches: int, limit_s: float = math.inf) -> _Rows:
        """The times of 0, 1, ... and at least `count` stages on workers of a class in front of others.

        Those within a limit are remembered until the next limit.
        """
        from chameleon_ft.search._kernels.pipeline_bounds import fill_bounds

        limit_s = limit_s if self.stages.limited else math.inf
        if limit_s < math.inf and limit_s != self._limit_s:
            self._limit_s = limit_s
            self._limited_rows.clear()
        known = self._rows if limit_s == math.inf else self._limited_rows
        key = after, kind, micro_batches
        found = known.get(key)
        if found is None or len(found.ended_s) <= count:
            last = self._end
            if after:
                own_kind, own_count, behind = _front(after)
                rows = self._rows_of(behind, own_kind, own_count, micro_batches, limit_s)
                last = _Rows(*(each[own_count] for each in rows))
            size = self.stages.num_layers + 1
            # Deeper pipelines are likely to be asked for next.
            more = 0 if found is None or limit_s < math.inf else 2 * len(found.ended_s)
            number = min(max(count + 1, more), size - len(after))
            found = _Rows(*np.empty((3, number, size)))
            for own, given in zip(found, last, strict=True):
                own[0] = given
            fill_bounds(self.tables, kind, len(after), micro_batches, limit_s, self.sync_s, *found)
            if limit_s == math.inf:
                self._remembered += 3 * found.ended_s.size
                if self._remembered > _REMEMBERED:
                    self._rows.clear()
                    self._remembered = 3 * found.ended_s.size
            known[key] = found
        return found


class PipelineEstimates(PipelineBounds):
    """Estimates of pipelines: the bounds under the restriction that stages have room for many micro-batches.

    A stage has room for at least `in_flight_share` of the micro-batches that 1F1B has in flight on it, where it can.
    Some pipelines violate that and are faster, so an estimate is no bound.
    """

    def __init__(self, stages: Stages, sync: SyncCost, *, in_flight_share: float) -> None:
        super().__init__(stages, sync)
        self.tables = stages.tables_with_room(in_flight_share)


def _last_fitting(fits: Callable[[int], bool], most: int, at: int) -> int:
    """The last number from 1 to `most` that fits, as all below it do; 0 if none does. By galloping from `at`."""
    low, high, step = 0, most, 1
    at = min(max(at, 1), most)
    passed = failed = False
    while low < high:
        if fits(at):
            low, passed = at, True
        else:
            high, failed = at - 1, True
        step *= 2
        at = (low + high + 1) // 2 if passed and failed else min(low + step, high) if passed else max(high - step, 1)
    return low


# The shapes of a search are asked for over and over.
@lru_cache(maxsize=20_000)
def _front(shape: Shape) -> tuple[int, int, Shape]:
    """Of the neighbours of one class at the front of a pipeline: the class, how many they are, and those behind."""
    kind, own = next(iter(groupby(shape)))
    count = len(list(own))
    return kind, count, shape[count:]
