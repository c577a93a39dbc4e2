"""The inner loop of `search._mix`, compiled by numba."""

from __future__ import annotations

from typing import Final

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Integers

_NONE: Final = -(2**40)


@lean_kernel
def most_by_number(sizes: Integers, worth: Integers, fewest: int, best: Integers, chosen: Integers) -> int:
    """Fill in what so many items are worth together at the most, by number of items and workers that they may take.

    Args:
        sizes, worth: of items.
        fewest: how many items there have to be.
        best: room for two rows, by workers.
        chosen: by number of items less one and workers, the index of the last item; to be filled in.

    Returns:
        With how many items all workers do most; zero where there is no way.
    """
    return fill_by_number(sizes, worth, fewest, best, chosen)


@lean_part
def fill_by_number(sizes: Integers, worth: Integers, fewest: int, best: Integers, chosen: Integers) -> int:
    """The same as a part of other kernels; sizes ascend."""
    count = best.shape[1] - 1
    best[0, :] = 0
    found, number = -1, 0
    for items in range(1, len(chosen) + 1):
        before, now = best[(items - 1) % 2], best[items % 2]
        for used in range(count + 1):
            # Where an item fits and those before it did not, what comes out is less than nothing.
            most, taken = _NONE, 0
            for item in range(len(sizes)):
                if sizes[item] > used:
                    break
                if before[used - sizes[item]] + worth[item] > most:
                    most, taken = before[used - sizes[item]] + worth[item], item
            now[used], chosen[items - 1, used] = most, taken
        if items >= fewest and now[count] > found:
            found, number = now[count], items
    return number
