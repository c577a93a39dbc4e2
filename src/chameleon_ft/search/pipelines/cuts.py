"""Cuts of a pipeline whose bound is within a limit, one stage after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from chameleon_ft.schedule.records import Floats

if TYPE_CHECKING:
    from chameleon_ft.search._kernels.pipeline_bounds import Pipeline, Tables

__all__ = ["Choice", "Cuts"]


class Choice(IntEnum):
    """Of the layers where a stage may stop: the one nearest to where it is wished to stop, the last, or the first."""

    NEAREST = 0
    LATEST = 1
    EARLIEST = 2


class Cuts:
    """The cuts of a pipeline by their bounds, stage by stage from the first.

    Args:
        tables: stages of the model.
        pipeline: what is cut.
        limit_s: what the bound may be.
        speeds: of the classes of workers.
        wishes: where stages are wished to stop; none for where they would if all that is left had equal work.
    """

    def __init__(
        self, tables: Tables, pipeline: Pipeline, limit_s: float, speeds: Floats, wishes: Sequence[int] = ()
    ) -> None:
        self._tables = tables
        self._pipeline = pipeline
        self._limit_s = limit_s
        self._speeds = speeds
        self._wishes = np.array(wishes, np.float64)
        self._room = np.empty(len(pipeline.sync_s), np.int64)

    def each(
        self, position: int = 0, start: int = 0, before_s: float = 0.0, after_s: float = 0.0
    ) -> Iterator[tuple[int, ...]]:
        """All cuts whose bound is within the limit, and some whose bound is a little larger.

        Args:
            position: of the next stage, which starts at layer `start`.
            before_s: until its first activation comes in.
            after_s: from when its last gradient has gone out, until all workers before it have ended.
        """
        # Here, as below, because to import a kernel loads numba, and most importers of this module run none.
        from chameleon_ft.search._kernels.pipeline_bounds import fill_allowed, passed

        if position == len(self._pipeline.shape):
            if start == len(self._pipeline.sync_s) - 1:
                yield ()
            return
        at = position, start
        count = fill_allowed(self._tables, self._pipeline, self._limit_s, *at, before_s, after_s, self._room)
        for stop in self._room[:count].tolist():
            until = passed(self._tables, self._pipeline, *at, stop, before_s, after_s)
            for cut_points in self.each(position + 1, stop, *until):
                yield (stop, *cut_points)

    def greedy(self, choice: Choice) -> tuple[int, ...] | None:
        """The cut of a choice at every stage; None where that leads nowhere."""
        from chameleon_ft.search._kernels.pipeline_bounds import greedy_cut

        cut_points = np.empty(len(self._pipeline.shape), np.int64)
        found = greedy_cut(
            self._tables,
            self._pipeline,
            self._limit_s,
            self._speeds,
            self._wishes,
            int(choice),
            self._room,
            cut_points,
        )
        return tuple(cut_points.tolist()) if found else None
