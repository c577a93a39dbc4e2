"""Least times of stages on workers of one kind that are in front of others."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.search._kinds import Shape

# By micro-batches of a window, and start.
Times = NDArray[np.float64]


class Chain:
    """Row n has the times of n such stages and those after them: all that has been asked for, and maybe more.

    Attributes:
        known: the last row that is filled in.
        returned_s, ended_s: by row, micro-batches of a window and start: until the last gradient has gone out again,
            and until all workers have reduced theirs; infinite where memory forbids all.
    """

    def __init__(self, rows: int, returned_s: Times, ended_s: Times) -> None:
        self.known = 0
        self.returned_s, self.ended_s = np.empty((2, rows + 1, *returned_s.shape))
        self.returned_s[0], self.ended_s[0] = returned_s, ended_s


def runs(shape: Shape) -> list[tuple[int, int, Shape]]:
    """Of neighbours of one kind: the kind, how many they are, and the kinds of those after them."""
    found: list[tuple[int, int, Shape]] = []
    stop = 0
    for kind, own in groupby(shape):
        count = len(list(own))
        stop += count
        found.append((kind, count, shape[stop:]))
    return found
