"""Lower bounds on pipelines: seconds that no order of operations beats, for the best cut and for a given one.

From the last stage of a pipeline to the first, three times are computed for the stages from some layer on. Each counts
from the arrival of the first activation there, and is the least over all cuts:

    first: the gradient of a single micro-batch has been sent back
    returned: the last gradient of m micro-batches has been sent back
    ended: every worker has finished computing and has reduced its gradients

A stage that takes f, b, w seconds (F; B or I; W), c seconds for a message to the next stage and s seconds for gradient
sync, with room for K micro-batches in flight and for V that wait for their W, gives

    first    = f + 2 c + first' + b
    idle     = max(0, f + 2 c + first' - min(m, K) f)
    rounds   = ceil(m / K)
    returned = max(m (f + b) + max(0, m - V) w + idle, f + 2 c + returned' + b,
                   rounds first + (m - rounds - (rounds - 1) (K - 1)) d)
    ended    = max(m (f + b + w) + idle + s, returned + w + s, f + c + ended')

where ' marks the stages after it, and d is the time between two gradients that leave the last stage. A stage runs at
most K forwards before the first gradient comes back, and then waits (idle). When its last I has ended, at most V of its
W are left. When it starts the F of the first micro-batch of a round, all but K - 1 micro-batches of earlier rounds are
back. The limit also holds in bytes: while an operation runs, all other micro-batches share the memory that it leaves.

K and V follow from memory: recomputing more layers of a stage makes b longer and K larger. `quick_s` takes the best
option for each of the three times separately. No pipeline may reach all three: `first` may assume stages that recompute
nothing, and `returned` stages that do. So `min_s` is the least limit on the step that the stages of some pipeline can
meet together. With K = P that is the bubble of ZB-H1, (P - 1) (f + b - w) (Qi et al., Zero Bubble Pipeline Parallelism,
2023). Nothing is assumed about the order of operations, so the bounds hold for
schedules with fewer micro-batches in flight than 1F1B too. `SyncLowerBound` bounds s by the number of pipelines.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate, groupby
from typing import Final, TypeAlias

import numpy as np

from chameleon_ft.quantities import ROUNDING, SUM_ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule.records import Floats, Integers
from chameleon_ft.search._kernels.records import Bounds, Pipeline
from chameleon_ft.search.stages import Stages, links_between, sums_by_stage
from chameleon_ft.search.worker_classes import Shape
from chameleon_ft.workload import Workload

# Numbers of pipelines that differ by up to this share have a common bound: their rings take nearly the same time.
_ALIKE: Final = 0.1


def has_gradients(workload: Workload) -> bool:
    """Return whether there is anything to reduce."""
    return any(layer.gradient_bytes for layer in workload.layers)


@dataclass(frozen=True, slots=True)
class SyncCost:
    """Seconds of gradient sync that follow the last operation of any stage.

    Attributes:
        fixed_s: latency, however many bytes there are.
        per_byte_s: for each byte of gradients.
        inside_bytes: bytes that a stage may reduce at that price, beside the gradients of layers that take no time.
        beyond_s: seconds more for each byte beyond that.
    """

    fixed_s: float = 0.0
    per_byte_s: float = 0.0
    inside_bytes: float = math.inf
    beyond_s: float = 0.0

    def of_stages(self, workload: Workload) -> Floats:
        """Return the seconds of every stage by start and stop, zero without gradients; float64 [L + 1, L + 1]."""
        layers = workload.layers
        num_bytes = sums_by_stage([float(layer.gradient_bytes) for layer in layers])
        for tied in workload.tied:
            # Parameters that several layers of a stage share are reduced once.
            before = np.searchsorted(np.array(tied.layers), np.arange(len(num_bytes)))
            copies = np.maximum(before[np.newaxis, :] - before[:, np.newaxis], 1)
            num_bytes -= (copies - 1) * float(tied.gradient_bytes)
        timeless = sums_by_stage(
            [0.0 if layer.forward_s + layer.min_backward_s else float(layer.gradient_bytes) for layer in layers]
        )
        beyond = np.maximum(0.0, num_bytes - timeless - self.inside_bytes)
        sync_s = self.fixed_s + self.per_byte_s * num_bytes + self.beyond_s * beyond
        return np.where(num_bytes > 0, sync_s, 0.0)


class SyncLowerBound:
    """Lower bound of the gradient sync of a stage with holders in some number of pipelines, in steps up to `max_s`.

    A ring of more workers than a host has goes between hosts, and its slowest link sets the pace. A smaller ring may
    lie inside a host. Then that host alone computes these layers for all micro-batches, so there is a limit to how many
    of them it can compute in the step; a stage that has more reduces the rest between hosts.
    """

    def __init__(self, costs: CostModel, max_s: float) -> None:
        self._costs = costs
        self._max_s = max_s
        self.of = cache(self._of)

    def _of(self, pipelines: int) -> SyncCost:
        """Return the least cost with this number of pipelines."""
        cluster = self._costs.cluster
        if pipelines < 2 or not has_gradients(self._costs.workload):
            return SyncCost()
        between_hosts = pipelines > cluster.host_sizes[0]
        links = [cluster.inter_host] if between_hosts else links_between(cluster)
        latency_s = min(link.latency_s for link in links)
        per_byte_s = 1 / max(link.bytes_per_s for link in links)
        passes = 2 * (pipelines - 1) / pipelines
        least = SyncCost(2 * (pipelines - 1) * latency_s, passes * per_byte_s)
        slower_s = 1 / cluster.inter_host.bytes_per_s - per_byte_s
        if between_hosts or cluster.inter_host not in links or slower_s <= 0:
            return least
        return SyncCost(least.fixed_s, least.per_byte_s, self._inside_bytes(pipelines), passes * slower_s)

    def _inside_bytes(self, pipelines: int) -> float:
        """Return the bytes of gradients that a host with a worker for each pipeline makes at most.

        Layers that take no time are not counted.
        """
        workload = self._costs.workload
        timed = ((layer.forward_s + layer.min_backward_s, float(layer.gradient_bytes)) for layer in workload.layers)
        busy = [(own_s, size) for own_s, size in timed if own_s > 0]
        if self._max_s == math.inf:
            return sum(size for _, size in busy)
        speeds: dict[str, list[float]] = defaultdict(list)
        for worker in self._costs.cluster.workers:
            speeds[worker.host].append(worker.speed)
        speed = max((sum(own) for own in speeds.values() if len(own) >= pipelines), default=0.0)
        # A fractional knapsack: no more than parts of layers, those with most bytes for their time, fit the time of the
        # host; and no more layers than of those that take least.
        budget_s = self._max_s * speed / workload.micro_batches * (1 + ROUNDING)
        count = sum(until_s <= budget_s for until_s in accumulate(sorted(own_s for own_s, _ in busy)))
        by_count = sum(sorted((size for _, size in busy), reverse=True)[:count])
        by_parts = 0.0
        for own_s, size in sorted(busy, key=lambda layer: -layer[1] / layer[0]):
            by_parts += size * min(1.0, budget_s / own_s)
            budget_s = max(0.0, budget_s - own_s)
        return min(by_count, by_parts)


def numbers_of_pipelines(most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) that cover 2 to `most`, each of numbers that are nearly the same."""
    first = 2
    while first <= most:
        last = min(most, int(first * (1 + _ALIKE)))
        yield first, last
        first = last + 1


# Kernels are imported where they are called: they load numba, which most importers of this module do not need.

CutPoints: TypeAlias = tuple[int, ...]
"""The layer after the last one of each stage of a pipeline, first stage to last."""

# Relative precision of bounds and of options found by bisection.
_PRECISION: Final = 2e-3
# Relative excess of a cut's bound over the least one. All up to `_BALANCED_SLACK` are tried, larger ones only if no cut
# is found.
_SLACKS: Final = (1e-9, 0.01, 0.04, math.inf)
_BALANCED_SLACK: Final = 0.04
# Limits on the step for which options are chosen, as shares above the least bound.
_LIMITS: Final = tuple(0.01 * 1.5**step for step in range(12))
# Most numbers in the cache of stage times.
_REMEMBERED: Final = 8_000_000


class PipelineBounds:
    """Lower bounds on pipelines of `stages`, including gradient sync; estimates if `in_flight_share` is positive.

    Estimates are bounds on pipelines whose stages have room, where possible, for at least that share of the
    micro-batches that 1F1B has in flight. A pipeline with less room may be faster, so an estimate is not a bound.
    """

    def __init__(self, stages: Stages, sync: SyncCost, in_flight_share: float = 0.0) -> None:
        self.stages = stages
        self.sync = sync
        self.tables = stages.tables._replace(in_flight_share=in_flight_share)
        self._bounds: dict[tuple[Shape, int, int], Bounds] = {}
        self._limited_bounds: dict[tuple[Shape, int, int], Bounds] = {}
        self._limit_s = math.inf
        self._remembered = 0
        self._quick_s: dict[tuple[Shape, int, int], list[float]] = {}
        self._ranges_s: dict[tuple[Shape, int], tuple[float, float]] = {}
        edge = np.full(stages.num_layers + 1, np.inf)
        edge[-1] = 0.0
        self._end = Bounds(edge, edge, edge)

    @cached_property
    def sync_s(self) -> Floats:
        """Seconds of gradient sync by start and stop, float64 [L + 1, L + 1]."""
        return self.sync.of_stages(self.stages.costs.workload)

    def sync_s_of(self, cut_points: CutPoints) -> Floats:
        """Return the seconds of gradient sync of each stage, float64 [stages]."""
        found: Floats = self.sync_s[[0, *cut_points[:-1]], list(cut_points)]
        return found

    def quick_s(self, shape: Shape, micro_batches: int) -> float:
        """Return a lower bound of `min_s`, much sooner: each time is minimized separately."""
        kind, count, after = _front(shape)
        known = self._quick_s.setdefault((after, kind, micro_batches), [])
        if count >= len(known):
            known[:] = self._bounds_of(after, kind, count, micro_batches).ended_s[:, 0].tolist()
        return known[count]

    def min_s(self, shape: Shape, micro_batches: int) -> float:
        """Return a lower bound, in seconds, on pipelines of this shape; infinite if none fits."""
        high_s = self.quick_s(shape, micro_batches)
        share = _PRECISION
        while high_s < math.inf and not self.holds(shape, micro_batches, high_s):
            high_s, share = high_s * (1 + share), 2 * share
        low_s, high_s = self._range_s(shape, micro_batches)
        while low_s * (1 + _PRECISION) < high_s < math.inf:
            self.holds(shape, micro_batches, (low_s + high_s) / 2)
            low_s, high_s = self._range_s(shape, micro_batches)
        return low_s

    def holds(self, shape: Shape, micro_batches: int, limit_s: float) -> bool:
        """Return whether the bounds allow a pipeline of this shape within a limit."""
        low_s, high_s = self._range_s(shape, micro_batches)
        if limit_s < low_s:
            return False
        # Times closer than the precision count as equal.
        if limit_s >= high_s or (low_s * (1 + _PRECISION) >= high_s and limit_s > low_s):
            return True
        kind, count, after = _front(shape)
        found = bool(self._bounds_of(after, kind, count, micro_batches, limit_s).ended_s[count, 0] <= limit_s)
        self._ranges_s[shape, micro_batches] = (low_s, limit_s) if found else (limit_s, high_s)
        return found

    def _range_s(self, shape: Shape, micro_batches: int) -> tuple[float, float]:
        """Return the longest time known to be too short, and the shortest one known to hold a pipeline."""
        key = shape, micro_batches
        if key not in self._ranges_s:
            quick_s = self.quick_s(*key)
            self._ranges_s[key] = quick_s, math.inf if self.stages.limited else quick_s
        return self._ranges_s[key]

    def most(self, shape: Shape, time_s: float, enough: int, *, quick: bool) -> int:
        """Return the most micro-batches, up to `enough`, that the bound allows, or the quick one."""
        # A number that memory forbids has an infinite bound.
        limit_s = min(time_s * (1 + SUM_ROUNDING), sys.float_info.max)

        def is_beyond(count: int) -> bool:
            return self.quick_s(shape, count) > limit_s if quick else not self.holds(shape, count, limit_s)

        return bisect_left(range(1, enough + 1), True, key=is_beyond)

    def bound_s(self, shape: Shape, cut_points: CutPoints, micro_batches: int, options: Sequence[int]) -> float:
        """Return a lower bound, in seconds, on any order of operations on this cut with these options."""
        return self._cut_s(shape, cut_points, micro_batches, math.inf, np.array(options))

    def chosen(self, shape: Shape, cut_points: CutPoints, micro_batches: int) -> list[tuple[float, tuple[int, ...]]]:
        """Return (bound, options of the stages) of this cut, for options whose bound is about the least.

        Under a longer limit stages recompute less, so that those in front need to hold fewer micro-batches, but their
        gradients take longer. No schedule comes near the bound with so little recomputation, so the options with which
        each stage on its own ends first are returned too. Empty if a stage does not fit.
        """

        def within(limit_s: float) -> tuple[int, ...] | None:
            """Return the options chosen for a step within a limit; None if a stage has none."""
            options = np.full(len(shape), -1)
            own_s = self._cut_s(shape, cut_points, micro_batches, limit_s, options)
            return tuple(options.tolist()) if own_s < math.inf else None

        by_stage = within(math.inf)
        if by_stage is None:
            return []
        found = {by_stage: self.bound_s(shape, cut_points, micro_batches, by_stage)}
        least = within(found[by_stage])
        if self.stages.limited and least != by_stage:
            min_s = self.quick_s(shape, micro_batches)
            for options in (least, *(within(min_s * (1 + slack)) for slack in _LIMITS)):
                if options is not None and options not in found:
                    found[options] = self.bound_s(shape, cut_points, micro_batches, options)
        best = min(found, key=found.__getitem__)
        return [(found[each], each) for each in dict.fromkeys((best, by_stage))]

    def _cut_s(
        self, shape: Shape, cut_points: CutPoints, micro_batches: int, limit_s: float, options: Integers
    ) -> float:
        from chameleon_ft.search._kernels.pipeline_bounds import cut_s

        return cut_s(self.tables, np.array(shape), np.array(cut_points), micro_batches, limit_s, self.sync_s, options)

    def cuts(self, shape: Shape, micro_batches: int, *, limit_s: float) -> Iterator[CutPoints]:
        """Yield all cuts whose bound is within a limit, and some slightly above it."""
        from chameleon_ft.search._kernels.pipeline_bounds import fill_allowed, next_stage

        pipeline = self._pipeline(shape, micro_batches, limit_s)
        allowed = np.empty(self.stages.num_layers, np.int64)

        def from_stage(position: int, start: int, before_s: float, after_s: float) -> Iterator[CutPoints]:
            """Yield the cuts of the stages from this one on; times are those of `fill_allowed`."""
            if position == len(shape):
                if start == self.stages.num_layers:
                    yield ()
                return
            count = fill_allowed(self.tables, pipeline, position, start, before_s, after_s, allowed)
            for stop in allowed[:count].tolist():
                times_s = next_stage(self.tables, pipeline, position, start, stop, before_s, after_s)
                for cut_points in from_stage(position + 1, stop, *times_s):
                    yield (stop, *cut_points)

        return from_stage(0, 0, 0.0, 0.0)

    def candidates(self, shape: Shape, micro_batches: int, *, far: bool = False) -> Iterator[CutPoints]:
        """Yield cuts whose bound is the least or slightly larger, with stages as equal as possible, or filled.

        If no schedule may come near the least bound (`far`), some cuts of any bound follow.
        """
        from chameleon_ft.search._kernels.pipeline_bounds import EARLIEST, LATEST, NEAREST

        min_s = self.min_s(shape, micro_batches)
        if min_s == math.inf:
            return
        found: list[CutPoints] = []
        for slack in _SLACKS:
            pipeline = self._pipeline(shape, micro_batches, min_s * (1 + slack))
            # Nearly equal stages, or small ones first, leave memory free where the least bound fills it.
            for rule in (NEAREST, EARLIEST) if found else (NEAREST, LATEST, EARLIEST):
                cut_points = self._greedy_cut(pipeline, rule)
                if cut_points is not None and cut_points not in found:
                    found.append(cut_points)
                    yield cut_points
            if slack >= _BALANCED_SLACK and found and not far:
                return

    def nearest(self, shape: Shape, micro_batches: int, wanted: Sequence[int], *, slack: float) -> CutPoints | None:
        """Return a cut whose stages end near the wanted layers, with a bound at most `slack` above the least."""
        from chameleon_ft.search._kernels.pipeline_bounds import NEAREST

        min_s = self.min_s(shape, micro_batches)
        if min_s == math.inf:
            return None
        return self._greedy_cut(self._pipeline(shape, micro_batches, min_s * (1 + slack)), NEAREST, wanted)

    def _greedy_cut(self, pipeline: Pipeline, rule: int, wanted: Sequence[int] = ()) -> CutPoints | None:
        from chameleon_ft.search._kernels.pipeline_bounds import greedy_cut

        allowed, cut_points = np.empty(self.stages.num_layers, np.int64), np.empty(len(pipeline.shape), np.int64)
        aims = np.array(wanted, np.float64)
        found = greedy_cut(self.tables, pipeline, self.stages.speeds, aims, rule, allowed, cut_points)
        return tuple(cut_points.tolist()) if found else None

    def _pipeline(self, shape: Shape, micro_batches: int, limit_s: float) -> Pipeline:
        limit_s = min(limit_s * (1 + SUM_ROUNDING), sys.float_info.max)
        after: list[Bounds] = []
        for position in range(1, len(shape)):
            kind, count, behind = _front(shape[position:])
            bounds = self._bounds_of(behind, kind, count, micro_batches, limit_s)
            after.append(Bounds(*(each[count] for each in bounds)))
        stacked = Bounds(*(np.stack(own) for own in zip(*after, self._end, strict=True)))
        return Pipeline(np.array(shape), micro_batches, limit_s, self.sync_s, stacked)

    def _bounds_of(self, after: Shape, kind: int, count: int, micro_batches: int, limit_s: float = math.inf) -> Bounds:
        """Return the bounds of 0, 1, ... up to at least `count` stages on workers of one class, followed by `after`.

        Bounds within a limit are cached until the limit changes.
        """
        from chameleon_ft.search._kernels.pipeline_bounds import fill_bounds

        limit_s = limit_s if self.stages.limited else math.inf
        if limit_s < math.inf and limit_s != self._limit_s:
            self._limit_s = limit_s
            self._limited_bounds.clear()
        known = self._bounds if limit_s == math.inf else self._limited_bounds
        key = after, kind, micro_batches
        found = known.get(key)
        if found is None or len(found.ended_s) <= count:
            last = self._end
            if after:
                own_kind, own_count, behind = _front(after)
                bounds = self._bounds_of(behind, own_kind, own_count, micro_batches, limit_s)
                last = Bounds(*(each[own_count] for each in bounds))
            size = self.stages.num_layers + 1
            # Requests for deeper pipelines are likely to follow.
            more = 0 if found is None or limit_s < math.inf else 2 * len(found.ended_s)
            found = Bounds(*np.empty((3, min(max(count + 1, more), size - len(after)), size)))
            for own, given in zip(found, last, strict=True):
                own[0] = given
            fill_bounds(self.tables, kind, len(after), micro_batches, limit_s, self.sync_s, found)
            if limit_s == math.inf:
                self._remembered += 3 * found.ended_s.size
                if self._remembered > _REMEMBERED:
                    self._bounds.clear()
                    self._remembered = 3 * found.ended_s.size
            known[key] = found
        return found


# A search asks for the same shapes many times.
@lru_cache(maxsize=20_000)
def _front(shape: Shape) -> tuple[int, int, Shape]:
    """Return the class of a pipeline's first workers, the number of workers in that run, and the rest."""
    count = len(list(next(groupby(shape))[1]))
    return shape[0], count, shape[count:]
