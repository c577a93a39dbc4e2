"""Unbounded knapsacks over workers of several classes and over the number of items, by dynamic programming."""

from __future__ import annotations

from typing import Final

from chameleon_ft.schedule.jit import no_refcount_kernel
from chameleon_ft.schedule.records import Integers

_IMPOSSIBLE: Final = -(2**40)


@no_refcount_kernel
def fill_table(
    counts: Integers,
    most: int,
    all_workers: bool,
    sizes: Integers,
    values: Integers,
    used: Integers,
    best: Integers,
    chosen: Integers,
) -> None:
    """Fill in the most that items are worth, for every choice of workers and, if it matters, every number of items.

    Args:
        counts: workers of each class, int64 [classes].
        most: items; negative where their number does not matter, and there is but one column.
        all_workers: no worker may be idle.
        sizes: workers of each class that an item takes, int64 [items, classes].
        values: worth of each item, int64 [items].
        used: int64 [classes], to work in.
        best: worth by workers (in mixed radix, the last class fastest) and items, int64 [states, most + 1 or 1];
            far below zero if no choice has exactly that many items, or uses up the workers.
        chosen: int64, shape of `best`: the last item, -1 - class for an idle worker, or `items` for no item at all.
    """
    items, classes = sizes.shape
    # The workers of each class in this state.
    used[:] = 0
    for state in range(best.shape[0]):
        for number in range(best.shape[1]):
            own, taken = (0 if number == 0 and (state == 0 or not all_workers) else _IMPOSSIBLE), items
            # One worker of some class more is idle than in a state before.
            stride = 1
            for kind in range(classes - 1, -1, -1):
                if used[kind] > 0 and not all_workers and best[state - stride, number] > own:
                    own, taken = best[state - stride, number], -1 - kind
                stride *= counts[kind] + 1
            # Or some item is added to a state before.
            if number > 0 or most < 0:
                for item in range(items):
                    offset, fits = 0, True
                    stride = 1
                    for kind in range(classes - 1, -1, -1):
                        fits = fits and sizes[item, kind] <= used[kind]
                        offset += sizes[item, kind] * stride
                        stride *= counts[kind] + 1
                    if fits:
                        worth = best[state - offset, number if most < 0 else number - 1] + values[item]
                        if worth > own:
                            own, taken = worth, item
            best[state, number], chosen[state, number] = own, taken
        # The next combination of workers.
        kind = classes - 1
        while kind >= 0:
            used[kind] += 1
            if used[kind] <= counts[kind]:
                break
            used[kind] = 0
            kind -= 1
