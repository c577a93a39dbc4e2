"""The best mixes of a given number of pipelines of workers of one kind, which differ in nothing but their depth."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from chameleon_ft.search._bounds import PipelineBounds
from chameleon_ft.search._kinds import Shape

_ROUNDING: Final = 1e-12
# More micro-batches than there are.
_ALL: Final = 2**62
# The most entries of all tables together.
_TABLE: Final = 200_000


def is_small(workers: int, depths: int, most: int) -> bool:
    """Whether there is room for the tables of up to `most` pipelines."""
    return (workers + 1) * depths * most <= _TABLE


class DepthMixes:
    """Mixes for one search; bounds are worked out where they are asked for.

    Args:
        bounds: those of pipelines that do not recompute, and of those that do, if there may be any.
        shapes: all of them, by depth.
        workers: their number.
        numbers: fewest and most pipelines.
    """

    def __init__(
        self, bounds: Sequence[PipelineBounds], shapes: tuple[Shape, ...], workers: int, numbers: tuple[int, int]
    ) -> None:
        # Here, as below, because to import a kernel loads numba, and most who import this run none.
        from chameleon_ft.search._depth_kernel import Room

        plain, *_ = bounds
        self._micro_batches = micro_batches = plain.pipelines.micro_batches
        self._fewest, most = numbers
        depths = len(shapes)
        self._shapes = shapes
        self._forms = plain.closed_forms(self._shapes, micro_batches)
        self._least = [each.by_depth(depths) for each in bounds]
        # Of nobody, if nobody may.
        self._rates = np.zeros(depths)
        for each in bounds[1:]:
            self._rates = each.closed_forms(shapes, micro_batches).rates
        self._opened = np.zeros(depths, np.bool_)
        self._active = np.ones(depths, np.int64)
        self._room = Room(
            sizes=np.empty(depths, np.int64),
            worth=np.empty(depths, np.int64),
            best=np.empty((2, workers + 1), np.int64),
            chosen=np.empty((most, workers + 1), np.int64),
        )
        self._numbers, self._missing = np.empty(depths, np.int64), np.empty(3, np.int64)

    def activate(self, shapes: Iterable[Shape]) -> None:
        """Go on with these."""
        self._active[:] = 0
        self._active[[len(shape) - 1 for shape in shapes]] = 1

    def promise(self, time_s: float) -> int:
        """The most micro-batches that a mix may finish in `time_s`, by a formula where bounds are not known."""
        return self._most(time_s, {}, _ALL)

    def each(self, time_s: float) -> list[int]:
        """The same of a single pipeline of each shape."""
        self.promise(time_s)
        found: list[int] = self._counts.tolist()
        return found

    def at(self, time_s: float, replayed: Mapping[Shape, Mapping[int, float]]) -> int:
        """What a mix may finish by bounds; see `shares` if these are all micro-batches.

        Args:
            time_s: see above.
            replayed: seconds of shapes by micro-batches; none that took longer than `time_s` is thought of.
        """
        return self._most(time_s, replayed, self._micro_batches)

    def _most(self, time_s: float, replayed: Mapping[Shape, Mapping[int, float]], wanted: int) -> int:
        from chameleon_ft.search._depth_kernel import best_of_depths

        self._counts = self._forms.most(time_s) * self._active
        enough = self._micro_batches * self._active
        for shape, known in replayed.items():
            too_many = [count for count, own_s in known.items() if own_s > time_s]
            if too_many:
                enough[len(shape) - 1] = min(enough[len(shape) - 1], min(too_many) - 1)
        # Where memory forbids it, it takes for ever.
        limit_s = min(time_s * (1 + _ROUNDING), sys.float_info.max)
        plain, *others = self._least
        while True:
            found = best_of_depths(
                plain.arrays,
                others[0].arrays if others else plain.arrays,
                self._rates,
                limit_s,
                enough,
                wanted,
                self._fewest,
                self._opened,
                self._room,
                self._counts,
                self._numbers,
                self._missing,
            )
            if found >= 0:
                return found
            which, depth, window = self._missing.tolist()
            self._least[which].fill(depth, window)

    def shares(self) -> list[tuple[Shape, int, int]]:
        """What the mix was made of when it was last asked for: (shape, micro-batches, number)."""
        return [
            (shape, count, number)
            for shape, count, number in zip(self._shapes, self._counts.tolist(), self._numbers.tolist(), strict=True)
            if number
        ]
