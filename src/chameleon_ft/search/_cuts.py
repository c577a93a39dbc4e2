"""Cuts of one pipeline: which layers each stage may take if the pipeline is to end by a given time.

A cut is given by the `stops` of its stages. The bound on a pipeline's time has one condition for every stage and holds
for every order of operations (DESIGN section 4): what comes before the stage's first operation, what it computes, what
has to follow. Conditions add up over layers, and a layer costs no less in a stage than it does ahead of it. So a stage
that takes all it can lets the next one get as far as any other choice would: filling from the left decides whether
there is a cut, and bisection finds the least time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.search._conditions import SyncCost, conditions
from chameleon_ft.search._kinds import Kind, Shape
from chameleon_ft.search._memory import StageMemory, base_limit

Stops = tuple[int, ...]

_ROUNDING: Final = 1e-12
_PRECISION: Final = 1e-9
# More micro-batches than any workload has.
_MANY: Final = 1e12
# By how much the bound of a cut may be above the least one, where memory rules that one out.
_SLACKS: Final = (1e-8, 0.01, 0.03, 0.1, 0.3, 1.0, math.inf)


@dataclass(frozen=True, slots=True)
class _Stage:
    """How far a stage may get from where it starts.

    Attributes:
        lines: for each condition: heads and needs (prefix sums over layers), and between them what is fixed.
        held: prefix sums of bytes; empty where memory is not checked.
        capacity: of which so many may be held.
        furthest: every stage after this one needs a layer.
    """

    lines: list[tuple[list[float], float, list[float]]]
    held: list[int]
    capacity: int
    furthest: int

    def reach(self, start: int, limit_s: float) -> int:
        stop = self.furthest
        for head, fixed_s, needed in self.lines:
            allowed = needed[start] + limit_s - head[start] - fixed_s
            if allowed < needed[stop]:
                stop = bisect_right(needed, allowed, 0, stop) - 1
                if stop <= start:
                    return start
        if self.held and self.held[stop] > (allowed_bytes := self.held[start] + self.capacity):
            stop = bisect_right(self.held, allowed_bytes, 0, stop) - 1
        return stop


class Cuts:
    """What pipelines of workers of `kinds` can do, with fused or split backward."""

    def __init__(
        self, costs: CostModel, kinds: Sequence[Kind], *, split_backward: bool, sync: SyncCost | None = None
    ) -> None:
        self.split_backward = split_backward
        self._kinds = kinds
        self._num_layers = len(costs.workload.layers)
        self._memory = StageMemory(costs.workload, split_backward=split_backward)
        self._sync = sync or SyncCost()
        self._gradients = list(accumulate((layer.gradient_bytes for layer in costs.workload.layers), initial=0))
        self._conditions = conditions(costs, split_backward=split_backward)
        self._least_working = min(layer.working_bytes for layer in costs.workload.layers)
        self._needed: dict[tuple[int, int, bool, int], list[float]] = {}
        self._held: dict[int, list[int]] = {}
        self._heads: dict[tuple[int, float], list[float]] = {}
        self._stages: dict[tuple[Shape, int], list[_Stage]] = {}
        self._resolved: dict[tuple[Shape, int], tuple[float, float]] = {}
        self._last_most: dict[Shape, int] = {}

    def within(self, shape: Shape, micro_batches: int, time_s: float) -> Stops | None:
        """A cut that the bound and a bound on memory do not rule out, filled from the left; None if there is none."""
        limit_s = time_s * (1 + _ROUNDING)
        start = 0
        stops: list[int] = []
        # Most cuts that are ruled out are so at once: stages are worked out when they are come to.
        stages = self._stages.setdefault((shape, micro_batches), [])
        for position in range(len(shape)):
            if position == len(stages):
                stages.append(self._stage(shape, position, micro_batches))
            stop = stages[position].reach(start, limit_s)
            if stop <= start:
                return None
            stops.append(stop)
            start = stop
        return tuple(stops) if start == self._num_layers else None

    def most(self, shape: Shape, time_s: float, enough: int) -> int:
        """The most micro-batches, up to `enough`, that `within` does not rule out; zero if it rules out one."""
        count = min(self._last_most.get(shape, self._guess(shape, time_s)), enough)
        # Strides grow for the first look at a shape; from then on times differ little and so do counts.
        stride = 1
        if self._possible(shape, count, time_s):
            low, high = count, enough + 1
            while low + stride < high:
                if not self._possible(shape, low + stride, time_s):
                    high = low + stride
                    break
                low, stride = low + stride, 2 * stride
        else:
            low, high = 0, count
            while high - stride > 0:
                if self._possible(shape, high - stride, time_s):
                    low = high - stride
                    break
                high, stride = high - stride, 2 * stride
        while high - low > 1:
            middle = (low + high) // 2
            if self._possible(shape, middle, time_s):
                low = middle
            else:
                high = middle
        self._last_most[shape] = low
        return low

    def least_s(self, shape: Shape, micro_batches: int) -> float:
        """A time below which `within` finds nothing, and just above which it does; infinite if memory forbids all."""
        if self.within(shape, micro_batches, math.inf) is None:
            return math.inf
        low, high = self._resolved.get((shape, micro_batches), (0.0, math.inf))
        if high == math.inf:
            high = max(low, self._whole_s(shape, micro_batches))
            while self.within(shape, micro_batches, high) is None:
                low, high = high, 2 * high
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            if self.within(shape, micro_batches, middle) is None:
                low = middle
            else:
                high = middle
        self._resolved[shape, micro_batches] = low, high
        return low

    def bound_s(self, shape: Shape, stops: Stops, micro_batches: int) -> float:
        """Seconds below which no order of operations can be on this cut, whatever the links."""
        bound_s = 0.0
        for number, condition in enumerate(self._conditions):
            start = 0
            before_s = 0.0
            for position, (kind, stop) in enumerate(zip(shape, stops, strict=True)):
                needed = self._needed_s(number, kind, position == 0, micro_batches)
                after_s = self._sync.fixed_s if condition.ends_stage else 0.0
                own_s = micro_batches * condition.overhead_s + needed[stop] - needed[start]
                bound_s = max(bound_s, before_s + own_s + after_s)
                head_s = (condition.head[stop] - condition.head[start]) / self._kinds[kind].speed
                before_s += head_s + condition.boundary_s
                start = stop
        return bound_s

    def fits(self, shape: Shape, stops: Stops, micro_batches: int) -> bool:
        """Whether every stage can keep what 1F1B has in flight there."""
        starts = (0, *stops[:-1])
        return all(
            self._stage_fits(shape, position, start, stop, micro_batches)
            for position, (start, stop) in enumerate(zip(starts, stops, strict=True))
        )

    def holds(self, shape: Shape, micro_batches: int) -> bool:
        """Whether the memory of these workers holds everything if each stage takes as many layers as it can hold."""
        return self._from_the_left(shape, micro_batches, math.inf) is not None

    def limits(self, shape: Shape, stops: Stops, micro_batches: int) -> list[InFlightLimit]:
        """For each stage of a cut that fits, a limit up to twice the pipeline's depth that its memory allows."""
        depth = len(shape)
        starts = (0, *stops[:-1])
        found: list[InFlightLimit] = []
        for position, (kind, start, stop) in enumerate(zip(shape, starts, stops, strict=True)):
            base = base_limit(position, depth)
            capacity = self._kinds[kind].memory_bytes
            wishes = self._wishes(base, depth)
            fitting = (
                wish
                for wish in wishes
                if capacity is None or self._memory.stage_bytes(start, stop, wish, micro_batches) <= capacity
            )
            found.append(next(fitting, base))
        return found

    def candidates(self, shape: Shape, micro_batches: int) -> list[Stops]:
        """Cuts that fit of the least bound, or of one little larger: filled from the left, and from the right."""
        least_s = self.least_s(shape, micro_batches)
        if least_s == math.inf:
            return []
        for slack in _SLACKS:
            time_s = least_s * (1 + slack)
            left = self._from_the_left(shape, micro_batches, time_s)
            if left is not None:
                right = self._from_the_right(shape, left, micro_batches, time_s)
                return [left] if right is None or left == right else [left, right]
        return []

    def each(self, shape: Shape, micro_batches: int, limit_s: float) -> list[tuple[float, Stops]]:
        """All cuts that fit with a bound of up to `limit_s`, by bound."""
        bounds = (
            (self.bound_s(shape, stops, micro_batches), stops)
            for stops in self._each_from(shape, 0, 0, micro_batches, limit_s)
        )
        return sorted((bound_s, stops) for bound_s, stops in bounds if bound_s <= limit_s)

    def _each_from(
        self, shape: Shape, position: int, start: int, micro_batches: int, limit_s: float
    ) -> Iterator[Stops]:
        if position == len(shape):
            yield ()
            return
        last = position == len(shape) - 1
        most = self._reach(shape, position, start, micro_batches, limit_s)
        for stop in range(self._num_layers if last else start + 1, most + 1):
            if self._stage_fits(shape, position, start, stop, micro_batches):
                for rest in self._each_from(shape, position + 1, stop, micro_batches, limit_s):
                    yield (stop, *rest)

    def _from_the_left(self, shape: Shape, micro_batches: int, time_s: float) -> Stops | None:
        stops: list[int] = []
        start = 0
        for position in range(len(shape)):
            stop = self._reach(shape, position, start, micro_batches, time_s)
            while stop > start and not self._stage_fits(shape, position, start, stop, micro_batches):
                stop -= 1
            if stop <= start:
                return None
            stops.append(stop)
            start = stop
        return tuple(stops) if start == self._num_layers else None

    def _from_the_right(self, shape: Shape, left: Stops, micro_batches: int, time_s: float) -> Stops | None:
        """Each stage, the last one first, starts as early as it may; no stage stops later than in `left`."""
        stops = list(left)
        for position in range(len(shape) - 1, 0, -1):
            stop = stops[position]
            start = min(stops[position - 1], stop - 1)
            while (
                start > position
                and self._reach(shape, position, start - 1, micro_batches, time_s) >= stop
                and self._stage_fits(shape, position, start - 1, stop, micro_batches)
            ):
                start -= 1
            stops[position - 1] = start
        found = tuple(stops)
        possible = self.bound_s(shape, found, micro_batches) <= time_s * (1 + _ROUNDING)
        return found if possible and self.fits(shape, found, micro_batches) else None

    def _stage(self, shape: Shape, position: int, micro_batches: int) -> _Stage:
        fastest = max(self._kinds[kind].speed for kind in set(shape))
        heads = [self._head_s(number, fastest) for number in range(len(self._conditions))]
        kind = shape[position]
        lines = []
        for number, condition in enumerate(self._conditions):
            fixed_s = position * condition.boundary_s + micro_batches * condition.overhead_s
            if condition.ends_stage:
                fixed_s += self._sync.fixed_s
            lines.append((heads[number], fixed_s, self._needed_s(number, kind, position == 0, micro_batches)))
        capacity = self._kinds[kind].memory_bytes
        if capacity is None:
            return _Stage(lines, [], 0, self._num_layers - (len(shape) - 1 - position))
        held, messages = self._least_held(shape, position, micro_batches)
        return _Stage(lines, held, capacity - messages, self._num_layers - (len(shape) - 1 - position))

    def _least_held(self, shape: Shape, position: int, micro_batches: int) -> tuple[list[int], int]:
        """The least that a stage holds, in prefix sums, and on top: all messages as small as the smallest."""
        memory = self._memory
        live = min(len(shape) - position, micro_batches)
        output = 0 if position == len(shape) - 1 else memory.least_output
        incoming = memory.least_output if position else 0
        if self.split_backward:
            messages = (live + (min(live, 4) if position else micro_batches)) * output
        else:
            messages = (live + min(live, 4)) * output + incoming
        if position or not self.split_backward:
            messages += (micro_batches - live) * (output + incoming)
        return self._held_bytes(live), messages + self._least_working

    def _reach(self, shape: Shape, position: int, start: int, micro_batches: int, time_s: float) -> int:
        stages = self._stages.setdefault((shape, micro_batches), [])
        while len(stages) <= position:
            stages.append(self._stage(shape, len(stages), micro_batches))
        return stages[position].reach(start, time_s * (1 + _ROUNDING))

    def _head_s(self, number: int, speed: float) -> list[float]:
        found = self._heads.get((number, speed))
        if found is None:
            found = self._heads[number, speed] = [each / speed for each in self._conditions[number].head]
        return found

    def _held_bytes(self, live: int) -> list[int]:
        """Prefix sums of what layers hold with so many micro-batches in flight, without messages."""
        found = self._held.get(live)
        if found is None:
            memory = self._memory
            found = [state + live * each for state, each in zip(memory.state, memory.activations, strict=True)]
            self._held[live] = found
        return found

    def _needed_s(self, number: int, kind: int, first: bool, micro_batches: int) -> list[float]:
        """Prefix sums of what a stage has to do for all its micro-batches under a condition, on a worker of `kind`."""
        key = number, kind, first, micro_batches
        found = self._needed.get(key)
        if found is None:
            condition = self._conditions[number]
            scale = micro_batches / self._kinds[kind].speed
            per_byte_s = self._sync.per_byte_s if condition.ends_stage else 0.0
            work = condition.first_work if first else condition.work
            found = [scale * each + per_byte_s * held for each, held in zip(work, self._gradients, strict=True)]
            self._needed[key] = found
        return found

    def _possible(self, shape: Shape, micro_batches: int, time_s: float) -> bool:
        """Whether `within` finds a cut; what has been found out about other times is used."""
        if micro_batches == 0:
            return True
        low, high = self._resolved.get((shape, micro_batches), (0.0, math.inf))
        if not low < time_s < high:
            return time_s >= high
        possible = self.within(shape, micro_batches, time_s) is not None
        self._resolved[shape, micro_batches] = (low, time_s) if possible else (time_s, high)
        return possible

    def _guess(self, shape: Shape, time_s: float) -> int:
        """About the number of micro-batches that a pipeline of equal layers would finish."""
        condition = self._conditions[0]
        depth = len(shape)
        mean = sum(self._kinds[kind].speed for kind in shape) / depth
        head_s = ((condition.head[-1] / mean) * (depth - 1) / depth + (depth - 1) * condition.boundary_s) / 2
        largest = math.ceil(self._num_layers / depth) / self._num_layers
        each_s = largest * condition.work[-1] / mean + condition.overhead_s
        return max(1, int(min((time_s - head_s) / each_s, _MANY))) if each_s else 1

    def _whole_s(self, shape: Shape, micro_batches: int) -> float:
        """Twice about the time of a pipeline, and never zero."""
        slowest = min(self._kinds[kind].speed for kind in shape)
        condition = self._conditions[0]
        work_s = (micro_batches + len(shape)) * (condition.work[-1] / slowest / len(shape) + condition.overhead_s)
        sync_s = self._sync.fixed_s + self._sync.per_byte_s * self._gradients[-1]
        return 2 * (work_s + len(shape) * condition.boundary_s + sync_s) or 1.0

    def _wishes(self, base: InFlightLimit, depth: int) -> Iterator[InFlightLimit]:
        """Limits from the largest that is ever tried down to `base`."""
        for extra in range(depth, -1, -1):
            if self.split_backward:
                yield InFlightLimit(base.in_flight + extra, depth + extra)
            else:
                yield InFlightLimit(base.in_flight + extra, base.kept + extra)
        if self.split_backward:
            for kept in range(depth - 1, base.kept, -1):
                yield InFlightLimit(base.in_flight, kept)

    def _stage_fits(self, shape: Shape, position: int, start: int, stop: int, micro_batches: int) -> bool:
        capacity = self._kinds[shape[position]].memory_bytes
        if capacity is None:
            return True
        base = base_limit(position, len(shape))
        return self._memory.stage_bytes(start, stop, base, micro_batches) <= capacity
