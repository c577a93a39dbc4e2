"""Cuts of a pipeline whose bound is within a limit, one stage after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from chameleon_ft.search._kinds import Shape

if TYPE_CHECKING:
    from chameleon_ft.search._bounds import PipelineBounds, Stops

_ROUNDING: Final = 1e-12


class Cuts:
    """The cuts of a shape whose bound is within a limit, stage by stage from the first."""

    def __init__(
        self,
        bounds: PipelineBounds,
        shape: Shape,
        micro_batches: int,
        limit_s: float,
        wishes: Sequence[int] | None = None,
    ) -> None:
        self._bounds = bounds
        self._wishes = wishes
        self._shape = shape
        self._micro_batches = micro_batches
        self._limit_s = limit_s * (1 + _ROUNDING)
        self._window, self._place = bounds.window_of(micro_batches)

    def each(self, position: int = 0, start: int = 0, before_s: float = 0.0, after_s: float = 0.0) -> Iterator[Stops]:
        """All of them, and some whose bound is a little larger.

        Args:
            position: of the next stage, which starts at layer `start`.
            before_s: until its first activation comes in.
            after_s: from when its last gradient has gone out, until all workers before it are done.
        """
        if position == len(self._shape):
            if start == self._bounds.pipelines.num_layers:
                yield ()
            return
        for stop in self._stops(position, start, before_s, after_s):
            rest = self.each(position + 1, stop, *self._passed(position, start, stop, before_s, after_s))
            for stops in rest:
                yield (stop, *stops)

    def greedy(self, choose: Choice) -> Stops | None:
        """The cut of a choice at every stage; None where that leads nowhere."""
        position = start = 0
        before_s = after_s = 0.0
        found: list[int] = []
        while position < len(self._shape):
            stops = self._stops(position, start, before_s, after_s)
            if not stops:
                return None
            stop = choose(stops, self._wish(position, start))
            before_s, after_s = self._passed(position, start, stop, before_s, after_s)
            found.append(stop)
            position, start = position + 1, stop
        return tuple(found)

    def _stops(self, position: int, start: int, before_s: float, after_s: float) -> list[int]:
        """Where a stage may stop so that the bound on what is decided is within the limit."""
        shape, window = self._shape[position:], self._window
        pipelines = self._bounds.pipelines
        times = pipelines.times[shape[0]]
        stage = pipelines.stage(shape, window)
        computed_s = stage.computed_s[self._place, start]
        if len(shape) > 1:
            returned_s = pipelines.stage(shape[1:], window).returned_s[self._place]
            ended_s = self._bounds.ended(shape[1:], window)[self._place]
        else:
            returned_s = ended_s = pipelines.nothing_s[self._place]
        own_s = np.maximum(
            self._micro_batches * (times.forward_s[start] + times.backward_s[start]),
            times.through_s[start] + returned_s,
        )
        latest_s = np.maximum(computed_s + self._bounds.sync_s(start), times.down_s[start] + ended_s)
        np.maximum(latest_s, own_s + after_s, out=latest_s)
        limit_s = self._limit_s - before_s
        allowed = latest_s <= limit_s if limit_s < math.inf else latest_s < math.inf
        return [int(stop) for stop in np.flatnonzero(allowed)]

    def _passed(self, position: int, start: int, stop: int, before_s: float, after_s: float) -> tuple[float, float]:
        """`before_s` and `after_s` of the stage after this one."""
        times = self._bounds.pipelines.times[self._shape[position]]
        done_s = max(float(times.weight_s[start, stop] + self._bounds.sync_s(start)[stop]), after_s)
        back_s = float(times.message_s[stop] + times.backward_s[start, stop]) + done_s
        return before_s + float(times.down_s[start, stop]), back_s

    def _wish(self, position: int, start: int) -> float:
        """Where the stage is wished to stop; else where it would, in layers and parts, if all left had equal work."""
        if self._wishes is not None:
            return self._wishes[position]
        rest = self._shape[position:]
        if len(rest) == 1:
            return float(self._bounds.pipelines.num_layers)
        kinds = self._bounds.pipelines.kinds
        share = kinds[rest[0]].speed / sum(kinds[kind].speed for kind in rest)
        work_s = self._bounds.pipelines.times[rest[0]].work_s[start, start + 1 :]
        wanted_s = share * work_s[-1]
        index = int(np.searchsorted(work_s, wanted_s))
        below_s = work_s[index - 1] if index else 0.0
        part = (wanted_s - below_s) / (work_s[index] - below_s) if work_s[index] > below_s else 1.0
        return float(start + index + part)


class Choice(Protocol):
    """Takes one of the places where a stage may stop, given where it is wished to."""

    def __call__(self, stops: list[int], wish: float) -> int: ...


def nearest(stops: list[int], wish: float) -> int:
    return min(stops, key=lambda stop: (abs(stop - wish), -stop))


def latest(stops: list[int], wish: float) -> int:
    return stops[-1]


def earliest(stops: list[int], wish: float) -> int:
    return stops[0]
