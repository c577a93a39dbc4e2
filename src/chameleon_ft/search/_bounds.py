"""Bounds on pipelines: seconds that no order of operations can beat, for the best cut and for a given one.

Going from a pipeline's end to its start, two times are known of the stages from some layer on, both counted from when
the first activation comes in there, for m micro-batches and the best cut of each:

    returned: the last gradient has gone out again
    ended: every worker has computed everything and reduced its gradients

A stage of f, b, w seconds (F; B or I; W) with messages of c seconds to the next and s seconds of gradient sync gives

    first    = f + c + returned'(1) + c
    idle     = max(0, first - min(m, K) f)
    own      = max(m (f + b) + max(0, m - V) w + idle, f + c + returned' + c + b)
    returned = own
    ended    = max(m (f + b + w) + idle + s, own + w + s, f + c + ended')

where ' is of the stages after it, and what is largest over all workers is made least over all cuts, stage by stage. The
bounds of DESIGN section 4 are the special case of one stage that has more to do than the others.

Memory is a part of it. A stage has to be able to keep the micro-batches that 1F1B has in flight there. It cannot have
more than K in flight, so until the first gradient comes back it runs no more forwards than that; and no more than V can
wait for their W when the last I has ended, so the others have had theirs. With room for just one pipeline depth P, that
is the bubble of ZB-H1, (P - 1) (f + b - w) (Qi et al., Zero Bubble Pipeline Parallelism, 2023).
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._closed_form import ClosedForm
from chameleon_ft.search._cuts import Cuts, earliest, latest, nearest
from chameleon_ft.search._kinds import Kind, Shape
from chameleon_ft.search._memory import StageMemory
from chameleon_ft.search._stages import Seconds, gradient_bytes, stage_times, timeless_bytes

# Where each stage of a pipeline stops.
Stops: TypeAlias = tuple[int, ...]

_ROUNDING: Final = 1e-12
# Numbers of micro-batches that are looked at together.
_WINDOW: Final = 4
# Numbers in the matrices that are kept, the latest ones: 128 MB. Made again they take some hundredths of a millisecond.
_REMEMBERED: Final = 1 << 24
# By how much the bound of a cut may be above the least one; all are tried up to `_EVEN`, more where no cut is found.
_SLACKS: Final = (1e-9, 0.01, 0.04, math.inf)
_EVEN: Final = 0.04

# By micro-batches (of a window), start and stop; or without stop.
_Times: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SyncCost:
    """Seconds of gradient sync that follow the last operation of any stage.

    Attributes:
        fixed_s: whatever there is to reduce.
        per_byte_s: for each byte of gradients.
        inside_bytes: what a stage may reduce at that price, beside the gradients of layers that take no time.
        beyond_s: more for each byte beyond that.
    """

    fixed_s: float = 0.0
    per_byte_s: float = 0.0
    inside_bytes: float = math.inf
    beyond_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stage:
    """A first stage and what follows it: matrices by micro-batches, start and stop, infinite where memory forbids it.

    Attributes:
        computed_s: until its worker has computed everything.
        returned_s: the least time until the last gradient has gone out again; by micro-batches and start.
    """

    computed_s: _Times
    returned_s: _Times


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What memory does to stages of one worker: by micro-batches, start and stop.

    Attributes:
        forwards: the most that can be run until the first gradient comes back.
        weight_grads: the least W that have been run when the last I has ended.
    """

    forwards: NDArray[np.int64]
    weight_grads: NDArray[np.int64]


class Pipelines:
    """What pipelines of workers of `kinds` can do, with fused or split backward, before their gradients are reduced."""

    def __init__(self, costs: CostModel, kinds: Sequence[Kind], *, split_backward: bool) -> None:
        self.split_backward = split_backward
        self.kinds = tuple(kinds)
        self.layers = costs.workload.layers
        self.num_layers = len(costs.workload.layers)
        self.memory = StageMemory(costs.workload, split_backward=split_backward)
        self.times = tuple(stage_times(costs, kind, split_backward=split_backward) for kind in kinds)
        self.gradient_bytes = gradient_bytes(costs.workload)
        self.timeless_bytes = timeless_bytes(costs.workload)
        self.has_gradients = bool(self.gradient_bytes[0, -1])
        self.closed_form = ClosedForm(costs, kinds, split_backward=split_backward)
        self._bounds: dict[SyncCost, PipelineBounds] = {}
        self._stages: dict[tuple[Shape, int], _Stage] = {}
        self._held: dict[tuple[int, int], HeldBack] = {}
        nothing = np.full((_WINDOW, self.num_layers + 1), np.inf)
        nothing[:, -1] = 0.0
        self.nothing_s = nothing

    def bounds(self, sync: SyncCost) -> PipelineBounds:
        """The same with gradient sync."""
        found = self._bounds.get(sync)
        if found is None:
            found = self._bounds[sync] = PipelineBounds(self, sync)
        return found

    def stage(self, shape: Shape, window: int) -> _Stage:
        """A stage on a worker of the first kind of `shape`, and after it stages on the others."""
        key = shape, window
        found = self._stages.get(key)
        if found is None:
            while len(self._stages) * _WINDOW * (self.num_layers + 1) ** 2 > _REMEMBERED:
                self._stages.pop(next(iter(self._stages)))
            found = self._stages[key] = self._looked_at(shape, window)
        return found

    def capacities(self, shape: Shape) -> tuple[int | None, ...]:
        """Bytes of each worker."""
        return tuple(self.kinds[kind].memory_bytes for kind in shape)

    def fits(self, shape: Shape, stops: Stops, micro_batches: int) -> bool:
        """Whether every stage can keep what 1F1B has in flight there."""
        starts = (0, *stops[:-1])
        return all(
            self._room(shape[position:], micro_batches)[start, stop]
            for position, (start, stop) in enumerate(zip(starts, stops, strict=True))
        )

    def _looked_at(self, shape: Shape, window: int) -> _Stage:
        times = self.times[shape[0]]
        counts = window_counts(window)
        after_s = self.stage(shape[1:], window).returned_s if len(shape) > 1 else self.nothing_s
        held = self.held_back(shape[0], window)
        first_s = self.stage(shape[1:], 0).returned_s[0] if held and len(shape) > 1 else self.nothing_s[0]
        nothing = np.empty((0, 0, 0), dtype=np.int64)
        # Here, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.search._bounds_kernel import stage_bounds

        return _Stage(
            *stage_bounds(
                counts,
                times.forward_s,
                times.backward_s,
                times.weight_s,
                times.message_s,
                first_s,
                after_s,
                self._rooms(shape, counts) if held else nothing.astype(np.bool_),
                held.forwards if held else nothing,
                held.weight_grads if held else nothing,
            )
        )

    def held_back(self, kind: int, window: int) -> HeldBack | None:
        """What memory does to a stage on a worker of this kind; None where it is no matter."""
        capacity = self.kinds[kind].memory_bytes
        if capacity is None:
            return None
        found = self._held.get((capacity, window))
        if found is None:
            counts = window_counts(window)
            waiting = np.stack([self.memory.most_waiting(capacity, int(count)) for count in counts])
            by_count = counts[:, np.newaxis, np.newaxis]
            found = self._held[capacity, window] = HeldBack(
                forwards=np.minimum(by_count, self.memory.most_in_flight(capacity)),
                weight_grads=np.maximum(0, by_count - waiting),
            )
        return found

    def _rooms(self, shape: Shape, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        depth = len(shape)
        if counts[0] >= depth:
            capacity = self.kinds[shape[0]].memory_bytes
            assert capacity is not None
            most = self.memory.most_micro_batches(depth, capacity)
            return np.less_equal(counts[:, np.newaxis, np.newaxis], most)
        return np.stack([self._room(shape, int(count)) for count in counts])

    def _room(self, shape: Shape, micro_batches: int) -> NDArray[np.bool_]:
        """By start and stop, whether a stage on the first of these workers fits."""
        capacity = self.kinds[shape[0]].memory_bytes
        if capacity is None:
            return np.ones((self.num_layers + 1, self.num_layers + 1), dtype=np.bool_)
        return micro_batches <= self.memory.most_micro_batches(min(len(shape), micro_batches), capacity)


class PipelineBounds:
    """Bounds on pipelines with gradient sync; `cuts` are made by them."""

    def __init__(self, pipelines: Pipelines, sync: SyncCost) -> None:
        self.pipelines = pipelines
        self.sync = sync
        # A stage without gradients has nothing to wait for.
        num_bytes = pipelines.gradient_bytes
        beyond = np.maximum(0.0, num_bytes - pipelines.timeless_bytes - sync.inside_bytes)
        sync_s = sync.fixed_s + sync.per_byte_s * num_bytes + sync.beyond_s * beyond
        self._sync_s: Seconds = np.where(num_bytes > 0, sync_s, 0.0)
        self._ended: dict[tuple[Shape, int], _Times] = {}
        self._least: dict[Shape, dict[int, list[float]]] = {}
        self._last_most: dict[Shape, int] = {}

    @staticmethod
    def window_of(micro_batches: int) -> tuple[int, int]:
        """The window that a number of micro-batches is in, and its place there."""
        return divmod(micro_batches - 1, _WINDOW)

    def least_s(self, shape: Shape, micro_batches: int) -> float:
        """Seconds below which no pipeline of this shape can be; infinite if memory forbids all."""
        window, place = self.window_of(micro_batches)
        return self._least_in(shape, window)[place]

    def most(self, shape: Shape, time_s: float, enough: int) -> int:
        """The most micro-batches, up to `enough`, that the bound does not rule out; zero if it rules out one."""
        # Where memory forbids it, it takes for ever.
        limit_s = min(time_s * (1 + _ROUNDING), sys.float_info.max)
        guess = self._last_most.get(shape)
        if guess is None:
            guess = self.most_by_closed_form(shape, limit_s, enough)
        low, high = 0, enough
        at, step = min(max(guess, 1), enough), 1
        passed = failed = False
        # Times grow with micro-batches: window by window to where they pass the limit.
        while low < high:
            window = (at - 1) // _WINDOW
            first, last = window * _WINDOW + 1, min((window + 1) * _WINDOW, enough)
            below = bisect_right(self._least_in(shape, window), limit_s, 0, last - first + 1)
            if below == 0:
                high, failed = first - 1, True
            elif below == last - first + 1:
                low, passed = last, True
            else:
                low = high = first - 1 + below
            if passed and failed:
                at = (low + high + 1) // 2
            else:
                at = min(low + step, high) if passed else max(high - step + 1, 1)
            step *= 2
        self._last_most[shape] = low
        return low

    def most_by_closed_form(self, shape: Shape, time_s: float, enough: int) -> int:
        """The same of a bound that is made in no time, and less tight."""
        return self.pipelines.closed_form.most(shape, time_s * (1 + _ROUNDING), self.sync.per_byte_s, enough)

    def bound_s(self, shape: Shape, stops: Stops, micro_batches: int) -> float:
        """Seconds below which no order of operations can be on this cut, if it fits."""
        first_s = returned_s = ended_s = 0.0
        window, place = self.window_of(micro_batches)
        starts = (0, *stops[:-1])
        for kind, start, stop in zip(reversed(shape), reversed(starts), reversed(stops), strict=True):
            times, held = self.pipelines.times[kind], self.pipelines.held_back(kind, window)
            forward_s, backward_s = times.forward_s[start, stop], times.backward_s[start, stop]
            own_s, work_s = micro_batches * (forward_s + backward_s), micro_batches * times.work_s[start, stop]
            first_s += times.through_s[start, stop]
            if held is not None:
                forwards = held.forwards[place, start, stop]
                idle_s = max(0.0, first_s - backward_s - forwards * forward_s)
                own_s += idle_s + held.weight_grads[place, start, stop] * times.weight_s[start, stop]
                work_s += idle_s
            own_s = max(own_s, times.through_s[start, stop] + returned_s)
            computed_s = max(work_s, own_s + times.weight_s[start, stop])
            ended_s = max(computed_s + self._sync_s[start, stop], times.down_s[start, stop] + ended_s)
            returned_s = own_s
        return float(ended_s)

    def candidates(self, shape: Shape, micro_batches: int) -> list[Stops]:
        """Cuts that fit of the least bound, or of one little larger: stages as equal as can be, filled from the left,
        and from the right."""
        least_s = self.least_s(shape, micro_batches)
        if least_s == math.inf:
            return []
        found: list[Stops | None] = []
        for slack in _SLACKS:
            walk = Cuts(self, shape, micro_batches, least_s * (1 + slack))
            # Nearly equal stages, or small ones first, have room in memory where the least bound would have them full.
            found += map(walk.greedy, (nearest, earliest) if any(found) else (nearest, latest, earliest))
            if slack >= _EVEN and any(found):
                break
        if any(found):
            return list(dict.fromkeys(stops for stops in found if stops is not None))
        found_any = next(Cuts(self, shape, micro_batches, math.inf).each(), None)
        return [] if found_any is None else [found_any]

    def nearest(self, shape: Shape, micro_batches: int, wishes: Sequence[int], *, slack: float) -> Stops | None:
        """A cut whose stages stop near to where it is wished, with a bound that is little above the least."""
        least_s = self.least_s(shape, micro_batches)
        if least_s == math.inf:
            return None
        return Cuts(self, shape, micro_batches, least_s * (1 + slack), wishes).greedy(nearest)

    def each(self, shape: Shape, micro_batches: int, limit_s: float) -> list[tuple[float, Stops]]:
        """All cuts that fit with a bound of up to `limit_s`, by bound."""
        bounds = (
            (self.bound_s(shape, stops, micro_batches), stops)
            for stops in Cuts(self, shape, micro_batches, limit_s).each()
        )
        return sorted((bound_s, stops) for bound_s, stops in bounds if bound_s <= limit_s * (1 + _ROUNDING))

    def ended(self, shape: Shape, window: int) -> _Times:
        """By micro-batches and start: until all workers of these stages have reduced their gradients."""
        key = shape, window
        found = self._ended.get(key)
        if found is None:
            stage = self.pipelines.stage(shape, window)
            after_s = self.ended(shape[1:], window) if len(shape) > 1 else self.pipelines.nothing_s
            from chameleon_ft.search._bounds_kernel import end_bounds

            down_s = self.pipelines.times[shape[0]].down_s
            found = self._ended[key] = end_bounds(stage.computed_s, self._sync_s, down_s, after_s)
        return found

    def sync_s(self, start: int) -> Seconds:
        """Of stages from layer `start`, by where they stop."""
        found: Seconds = self._sync_s[start]
        return found

    def _least_in(self, shape: Shape, window: int) -> list[float]:
        by_window = self._least.setdefault(shape, {})
        found = by_window.get(window)
        if found is None:
            found = by_window[window] = self.ended(shape, window)[:, 0].tolist()
        return found


def window_counts(window: int) -> NDArray[np.int64]:
    """The numbers of micro-batches of a window."""
    return np.arange(window * _WINDOW + 1, (window + 1) * _WINDOW + 1)
