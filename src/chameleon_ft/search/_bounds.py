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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._chain import Chain, runs
from chameleon_ft.search._closed_form import ClosedForm, ClosedForms
from chameleon_ft.search._cuts import Choice, Cuts
from chameleon_ft.search._kinds import Kind, Shape
from chameleon_ft.search._least_table import LeastTable
from chameleon_ft.search._memory import Bytes, StageMemory
from chameleon_ft.search._stages import Seconds, StageTimes, gradient_bytes, stage_times, timeless_bytes

if TYPE_CHECKING:
    from chameleon_ft.search._bounds_kernel import Held, Times, Wanted

# Where each stage of a pipeline stops.
Stops: TypeAlias = tuple[int, ...]

_ROUNDING: Final = 1e-12
# Numbers of micro-batches that are looked at together.
_WINDOW: Final = 4
# By how much the bound of a cut may be above the least one; all are tried up to `_EVEN`, more where no cut is found.
_SLACKS: Final = (1e-9, 0.01, 0.04, math.inf)
_EVEN: Final = 0.04


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


class Pipelines:
    """What pipelines of workers of `kinds` can do, with fused or split backward, before their gradients are reduced."""

    def __init__(self, costs: CostModel, kinds: Sequence[Kind], *, split_backward: bool) -> None:
        self.split_backward = split_backward
        self.kinds = tuple(kinds)
        self.layers = costs.workload.layers
        self.micro_batches = costs.workload.micro_batches
        self.num_layers = len(costs.workload.layers)
        self._costs = costs
        self.closed_form = ClosedForm(costs, kinds, split_backward=split_backward)
        self._bounds: dict[SyncCost, PipelineBounds] = {}
        self.speeds = np.array([kind.speed for kind in kinds], np.float64)
        self._kernel_times: Times | None = None
        self._matters = np.array([kind.memory_bytes is not None for kind in kinds])
        self._rooms = np.empty((len(kinds), 0, 0, 0), np.int64)
        self._held: dict[int, Held] = {}
        nothing = np.full((_WINDOW, self.num_layers + 1), np.inf)
        nothing[:, -1] = 0.0
        self.nothing_s = nothing

    # Not everything is asked for.
    @cached_property
    def memory(self) -> StageMemory:
        """Bytes of stages."""
        return StageMemory(self._costs.workload, split_backward=self.split_backward)

    @cached_property
    def times(self) -> tuple[StageTimes, ...]:
        """Seconds of stages, by kind."""
        return tuple(stage_times(self._costs, kind, split_backward=self.split_backward) for kind in self.kinds)

    @cached_property
    def gradient_bytes(self) -> Seconds:
        """Those of stages."""
        return gradient_bytes(self._costs.workload)

    @cached_property
    def timeless_bytes(self) -> Seconds:
        """The same of layers that take no time."""
        return timeless_bytes(self._costs.workload)

    @cached_property
    def bytes_until(self) -> Seconds:
        """Bytes of gradients up to each layer."""
        return np.concatenate([[0.0], np.cumsum([float(layer.gradient_bytes) for layer in self.layers])])

    @cached_property
    def unsynced(self) -> PipelineBounds:
        """`bounds` without gradient sync."""
        return self.bounds(SyncCost())

    def bounds(self, sync: SyncCost) -> PipelineBounds:
        """The same with gradient sync."""
        found = self._bounds.get(sync)
        if found is None:
            found = self._bounds[sync] = PipelineBounds(self, sync)
        return found

    def kernel_times(self) -> Times:
        """The times of stages as kernels have them."""
        if self._kernel_times is None:
            # Here, as below, because to import a kernel loads numba, and most who import this run none.
            from chameleon_ft.search._bounds_kernel import Times

            self._kernel_times = Times(
                *(np.stack([getattr(times, name) for times in self.times]) for name in Times._fields)
            )
        return self._kernel_times

    def held(self, window: int, deepest: int) -> Held:
        """What memory does to stages of pipelines up to so deep."""
        from chameleon_ft.search._bounds_kernel import Held

        if self._rooms.shape[1] <= deepest:
            self._rooms = self._made_rooms(deepest)
            self._held = {own: Held(self._matters, self._rooms, *held[2:]) for own, held in self._held.items()}
        found = self._held.get(window)
        if found is None:
            found = self._held[window] = Held(self._matters, self._rooms, *self._held_back(window))
        return found

    def _made_rooms(self, deepest: int) -> Bytes:
        """By kind; zeros where memory is no matter."""
        known = {
            kind: self.memory.rooms(own.memory_bytes, deepest)
            for kind, own in enumerate(self.kinds)
            if own.memory_bytes is not None
        }
        size = self.num_layers + 1
        made = np.zeros((len(self.kinds), min(map(len, known.values()), default=deepest + 1), size, size), np.int64)
        for kind, rooms in known.items():
            made[kind] = rooms[: made.shape[1]]
        return made

    def _held_back(self, window: int) -> tuple[Bytes, Bytes]:
        size = self.num_layers + 1
        forwards, weight_grads = np.zeros((2, len(self.kinds), _WINDOW, size, size), np.int64)
        for kind, own in enumerate(self.kinds):
            if own.memory_bytes is not None:
                held = self.memory.held_back(own.memory_bytes, window_counts(window))
                forwards[kind], weight_grads[kind] = held.forwards, held.weight_grads
        return forwards, weight_grads

    def capacities(self, shape: Shape) -> tuple[int | None, ...]:
        """Bytes of each worker."""
        return tuple(self.kinds[kind].memory_bytes for kind in shape)

    def fits(self, shape: Shape, stops: Stops, micro_batches: int) -> bool:
        """Whether every stage can keep what 1F1B has in flight there."""
        starts = (0, *stops[:-1])
        for position, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            capacity = self.kinds[shape[position]].memory_bytes
            if capacity is not None:
                to_end = min(len(shape) - position, micro_batches)
                if micro_batches > self.memory.rooms(capacity, to_end)[to_end, start, stop]:
                    return False
        return True


class PipelineBounds:
    """Bounds on pipelines with gradient sync; `cuts` are made by them."""

    def __init__(self, pipelines: Pipelines, sync: SyncCost) -> None:
        self.pipelines = pipelines
        self.sync = sync
        self._chains: dict[tuple[int, Shape, int], Chain] = {}
        self._least: dict[Shape, dict[int, list[float]]] = {}
        self._last_most: dict[Shape, int] = {}
        self._by_depth: LeastTable | None = None

    @cached_property
    def _sync_s(self) -> Seconds:
        """Of stages; one without gradients has nothing to wait for."""
        sync, num_bytes = self.sync, self.pipelines.gradient_bytes
        beyond = np.maximum(0.0, num_bytes - self.pipelines.timeless_bytes - sync.inside_bytes)
        sync_s = sync.fixed_s + sync.per_byte_s * num_bytes + sync.beyond_s * beyond
        return np.where(num_bytes > 0, sync_s, 0.0)

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

    def closed_forms(self, shapes: tuple[Shape, ...], enough: int) -> ClosedForms:
        """The same for all of some shapes at once, whatever the time."""
        return self.pipelines.closed_form.of(shapes, self.sync.per_byte_s, enough)

    def by_depth(self, depths: int) -> LeastTable:
        """The bounds on pipelines of up to so many workers of the first kind, always the same number of them."""
        if self._by_depth is None:
            self._by_depth = LeastTable(self, depths, _WINDOW)
        return self._by_depth

    def bound_s(self, shape: Shape, stops: Stops, micro_batches: int) -> float:
        """Seconds below which no order of operations can be on this cut, if it fits."""
        from chameleon_ft.search._bounds_kernel import cut_s

        pipelines = self.pipelines
        window, place = self.window_of(micro_batches)
        return cut_s(
            pipelines.kernel_times(),
            pipelines.held(window, len(shape)),
            np.array(shape),
            np.array(stops),
            place,
            micro_batches,
            self._sync_s,
        )

    def candidates(self, shape: Shape, micro_batches: int) -> Iterator[Stops]:
        """Cuts that fit of the least bound, or of one little larger: with stages as equal as can be, or filled."""
        least_s = self.least_s(shape, micro_batches)
        if least_s == math.inf:
            return
        cuts = Cuts(self, shape, micro_batches)
        found: list[Stops] = []
        for slack in _SLACKS:
            # Nearly equal stages, or small ones first, have room in memory where the least bound would have them full.
            for choice in (Choice.NEAREST, Choice.EARLIEST) if found else Choice:
                stops = cuts.greedy(least_s * (1 + slack), choice)
                if stops is not None and stops not in found:
                    found.append(stops)
                    yield stops
            if slack >= _EVEN and found:
                return
        if not found:
            yield from islice(cuts.each(math.inf), 1)

    def nearest(self, shape: Shape, micro_batches: int, wishes: Sequence[int], *, slack: float) -> Stops | None:
        """A cut whose stages stop near to where it is wished, with a bound that is little above the least."""
        least_s = self.least_s(shape, micro_batches)
        if least_s == math.inf:
            return None
        return Cuts(self, shape, micro_batches, wishes).greedy(least_s * (1 + slack), Choice.NEAREST)

    def each(self, shape: Shape, micro_batches: int, limit_s: float) -> list[tuple[float, Stops]]:
        """All cuts that fit with a bound of up to `limit_s`, by bound."""
        bounds = (
            (self.bound_s(shape, stops, micro_batches), stops)
            for stops in Cuts(self, shape, micro_batches).each(limit_s)
        )
        return sorted((bound_s, stops) for bound_s, stops in bounds if bound_s <= limit_s * (1 + _ROUNDING))

    def chain(self, kind: int, count: int, after: Shape, window: int) -> Chain:
        """The times of up to so many stages on workers of this kind in front of others."""
        found = self._chains.get((kind, after, window))
        if found is None:
            returned_s = ended_s = self.pipelines.nothing_s
            if after:
                _, number, _ = first = runs(after)[0]
                times = self.chain(*first, window)
                returned_s, ended_s = times.returned_s[number], times.ended_s[number]
            found = self._chains[kind, after, window] = Chain(self.pipelines.num_layers, returned_s, ended_s)
        if found.known < count:
            self._extend(found, kind, count, after, window)
        return found

    def _extend(self, chain: Chain, kind: int, count: int, after: Shape, window: int) -> None:
        from chameleon_ft.search._bounds_kernel import fill_bounds

        pipelines = self.pipelines
        if pipelines.kinds[kind].memory_bytes is None:
            known = chain.known
            first_s = np.zeros((count - known, pipelines.num_layers + 1))
        else:
            # For few micro-batches that is this chain itself, and each stage needs what is known of those after it.
            firsts = pipelines.unsynced.chain(kind, count - 1, after, 0)
            known = chain.known
            first_s = np.ascontiguousarray(firsts.returned_s[known:count, 0])
        fill_bounds(
            pipelines.kernel_times(),
            pipelines.held(window, count + len(after)),
            kind,
            known + len(after),
            window_counts(window),
            self._sync_s,
            first_s,
            chain.returned_s[known],
            chain.ended_s[known],
            chain.returned_s[known + 1 : count + 1],
            chain.ended_s[known + 1 : count + 1],
        )
        chain.known = count

    def wanted(self, shape: Shape, micro_batches: int) -> Wanted:
        """What is asked of cuts of this shape."""
        from chameleon_ft.search._bounds_kernel import Wanted

        window, place = self.window_of(micro_batches)
        plain = self.pipelines.unsynced
        after = [
            (count, self.chain(kind, count - 1, rest, window), plain.chain(kind, count - 1, rest, 0))
            for kind, count, rest in runs(shape)
        ]
        return Wanted(
            shape=np.array(shape),
            place=place,
            micro_batches=micro_batches,
            sync_s=self._sync_s,
            first_s=np.concatenate([first.returned_s[:count, 0][::-1] for count, _, first in after]),
            returned_s=np.concatenate([own.returned_s[:count, place][::-1] for count, own, _ in after]),
            ended_s=np.concatenate([own.ended_s[:count, place][::-1] for count, own, _ in after]),
        )

    def sync_s_of(self, stops: Stops) -> Seconds:
        """Of the stages of a cut."""
        return np.asarray(self._sync_s[[0, *stops[:-1]], stops])

    def sync_s(self, start: int) -> Seconds:
        """Of stages from layer `start`, by where they stop."""
        return np.asarray(self._sync_s[start])

    def _least_in(self, shape: Shape, window: int) -> list[float]:
        by_window = self._least.setdefault(shape, {})
        found = by_window.get(window)
        if found is None:
            kind, count, after = runs(shape)[0]
            found = by_window[window] = self.chain(kind, count, after, window).ended_s[count, :, 0].tolist()
        return found


def window_counts(window: int) -> NDArray[np.int64]:
    """The numbers of micro-batches of a window."""
    return np.arange(window * _WINDOW + 1, (window + 1) * _WINDOW + 1)
