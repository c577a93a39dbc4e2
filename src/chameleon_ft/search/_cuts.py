"""Cuts of a pipeline whose bound is within a limit, one stage after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from chameleon_ft.search._kinds import Shape

if TYPE_CHECKING:
    from chameleon_ft.search._bounds import PipelineBounds, Stops

_ROUNDING: Final = 1e-12


class Choice(IntEnum):
    """Of the places where a stage may stop: that which is nearest to where it is wished to, the last, or the first."""

    NEAREST = 0
    LATEST = 1
    EARLIEST = 2


class Cuts:
    """The cuts of a shape whose bound is within a limit, stage by stage from the first.

    Args:
        wishes: where stages are wished to stop; None for where they would if all that is left had equal work.
    """

    def __init__(
        self, bounds: PipelineBounds, shape: Shape, micro_batches: int, wishes: Sequence[int] | None = None
    ) -> None:
        self._sync_s = bounds.sync_s
        self._pipelines = bounds.pipelines
        self._wishes = np.array([] if wishes is None else wishes, np.float64)
        self._shape = shape
        window, _ = bounds.window_of(micro_batches)
        self._about = bounds.pipelines.kernel_times(), bounds.pipelines.held(window, len(shape))
        self._wanted = bounds.wanted(shape, micro_batches)
        self._room = np.empty(bounds.pipelines.num_layers, np.int64)

    def each(
        self, limit_s: float, position: int = 0, start: int = 0, before_s: float = 0.0, after_s: float = 0.0
    ) -> Iterator[Stops]:
        """All of them, and some whose bound is a little larger.

        Args:
            limit_s: what the bound may be.
            position: of the next stage, which starts at layer `start`.
            before_s: until its first activation comes in.
            after_s: from when its last gradient has gone out, until all workers before it are done.
        """
        if position == len(self._shape):
            if start == self._pipelines.num_layers:
                yield ()
            return
        # Here, as below, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.search._bounds_kernel import fill_allowed

        limited_s = limit_s * (1 + _ROUNDING)
        count = fill_allowed(*self._about, self._wanted, limited_s, position, start, before_s, after_s, self._room)
        for stop in self._room[:count].tolist():
            rest = self.each(limit_s, position + 1, stop, *self._passed(position, start, stop, before_s, after_s))
            for stops in rest:
                yield (stop, *stops)

    def greedy(self, limit_s: float, choice: Choice) -> Stops | None:
        """The cut of a choice at every stage; None where that leads nowhere."""
        from chameleon_ft.search._bounds_kernel import greedy_cut

        stops = np.empty(len(self._shape), np.int64)
        limited_s = limit_s * (1 + _ROUNDING)
        speeds = self._pipelines.speeds
        leads = greedy_cut(*self._about, self._wanted, limited_s, speeds, self._wishes, int(choice), self._room, stops)
        return tuple(stops.tolist()) if leads else None

    def _passed(self, position: int, start: int, stop: int, before_s: float, after_s: float) -> tuple[float, float]:
        """`before_s` and `after_s` of the stage after this one."""
        times = self._pipelines.times[self._shape[position]]
        done_s = max(float(times.weight_s[start, stop] + self._sync_s(start)[stop]), after_s)
        back_s = float(times.message_s[stop] + times.backward_s[start, stop]) + done_s
        return before_s + float(times.down_s[start, stop]), back_s
