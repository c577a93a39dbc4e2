"""The best mixes of a given number of pipelines of workers of one kind, which differ in nothing but their depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from chameleon_ft.search._bounds import PipelineBounds
from chameleon_ft.search._kinds import Shape

if TYPE_CHECKING:
    from chameleon_ft.search._depth_kernel import Replayed

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
        from chameleon_ft.search._depth_kernel import Depths, Made, Room

        plain, *_ = bounds
        self._micro_batches = micro_batches = plain.pipelines.micro_batches
        fewest, most = numbers
        depths = len(shapes)
        self._shapes = shapes
        self._least = [each.by_depth(depths) for each in bounds]
        # Of nobody, if nobody may.
        rates = np.zeros(depths)
        for each in bounds[1:]:
            rates = each.closed_forms(shapes, micro_batches).rates
        self._missing = np.empty(3, np.int64)
        self._depths = Depths(
            plain=self._least[0].arrays,
            recomputing=self._least[-1].arrays,
            formula=plain.closed_forms(shapes, micro_batches).formula,
            rates=rates,
            micro_batches=micro_batches,
            fewest=fewest,
            active=np.ones(depths, np.int64),
            opened=np.zeros(depths, np.bool_),
            room=Room(
                sizes=np.empty(depths, np.int64),
                worth=np.empty(depths, np.int64),
                best=np.empty((2, workers + 1), np.int64),
                chosen=np.empty((most, workers + 1), np.int64),
            ),
            guess=np.zeros(depths, np.int64),
            enough=np.empty(depths, np.int64),
            missing=self._missing,
        )
        self._made, self._best = (Made(*np.empty((2, depths), np.int64)) for _ in range(2))

    def activate(self, shapes: Iterable[Shape]) -> None:
        """Go on with these."""
        active = self._depths.active
        active[:] = 0
        active[[len(shape) - 1 for shape in shapes]] = 1

    def promise(self, time_s: float) -> int:
        """The most micro-batches that a mix may finish in `time_s`, by a formula where bounds are not known."""
        return self._most(time_s, {}, _ALL)

    def each(self, time_s: float) -> list[int]:
        """The same of a single pipeline of each shape."""
        self.promise(time_s)
        found: list[int] = self._made.counts.tolist()
        return found

    def at(self, time_s: float, replayed: Mapping[Shape, Mapping[int, float]]) -> int:
        """What a mix may finish by bounds; see `shares` if these are all micro-batches.

        Args:
            time_s: see above.
            replayed: seconds of shapes by micro-batches; none that took longer than `time_s` is thought of.
        """
        return self._most(time_s, replayed, self._micro_batches)

    def narrowed(
        self, low: float, high: float, replayed: Mapping[Shape, Mapping[int, float]], *, precision: float
    ) -> float:
        """The least time between `low` and `high` in which a mix may finish all, from below; see `shares` for the mix.

        Args:
            low, high: seconds.
            replayed: see above.
            precision: share of the time by which it may be too low.
        """
        from chameleon_ft.search._depth_kernel import narrow

        self.at(high, replayed)
        for best, own in zip(self._best, self._made, strict=True):
            best[:] = own
        known, within_s = _arrays(replayed), np.array([low, high])
        while not narrow(self._depths, known, precision, within_s, self._made, self._best):
            self._fill()
        for best, own in zip(self._best, self._made, strict=True):
            own[:] = best
        return float(within_s[0])

    def _most(self, time_s: float, replayed: Mapping[Shape, Mapping[int, float]], wanted: int) -> int:
        from chameleon_ft.search._depth_kernel import best_of_depths

        known = _arrays(replayed)
        while (found := best_of_depths(self._depths, known, time_s, wanted, self._made)) < 0:
            self._fill()
        return found

    def _fill(self) -> None:
        """Fill in the bound that is missing."""
        which, depth, window = self._missing.tolist()
        self._least[which].fill(depth, window)

    def shares(self) -> list[tuple[Shape, int, int]]:
        """What the mix was made of when it was last asked for: (shape, micro-batches, number)."""
        made = zip(self._shapes, self._made.counts.tolist(), self._made.numbers.tolist(), strict=True)
        return [(shape, count, number) for shape, count, number in made if number]


def _arrays(replayed: Mapping[Shape, Mapping[int, float]]) -> Replayed:
    from chameleon_ft.search._depth_kernel import Replayed

    rows = [(len(shape) - 1, count, own_s) for shape, known in replayed.items() for count, own_s in known.items()]
    return Replayed(
        np.array([depth for depth, _, _ in rows], np.int64),
        np.array([count for _, count, _ in rows], np.int64),
        np.array([own_s for _, _, own_s in rows], np.float64),
    )
