"""The inner loops of `search._depth_mixes`, compiled by numba: arrays by depth of a pipeline, less one."""

from __future__ import annotations

from typing import Final, NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Booleans, Floats, Integers

_MISSING: Final = -1
# Of items that do not fit, less than nothing.
_NONE: Final = -(2**40)


class Least(NamedTuple):
    """Bounds on pipelines, as far as they have been asked for.

    Attributes:
        time_s: by depth and micro-batches, less one.
        known: by depth and window, whether these are there.
        guess: by depth, how many micro-batches were possible last time: where to look first.
    """

    time_s: Floats
    known: Booleans
    guess: Integers


class Room(NamedTuple):
    """Room to work in, by depth and as `_fill_by_number` has it."""

    sizes: Integers
    worth: Integers
    best: Integers
    chosen: Integers


@lean_kernel
def best_of_depths(
    plain: Least,
    recomputing: Least,
    rates: Floats,
    limit_s: float,
    enough: Integers,
    wanted: int,
    fewest: int,
    opened: Booleans,
    room: Room,
    counts: Integers,
    numbers: Integers,
    missing: Integers,
) -> int:
    """The most micro-batches that so many pipelines can finish by `limit_s`.

    Args:
        plain, recomputing: bounds.
        rates: by depth, micro-batches for each second that nobody who recomputes can pass.
        limit_s: seconds.
        enough: by depth, what is not worth to be passed.
        wanted: if less than that comes out, it does not matter how.
        fewest: pipelines; the most are those that there is room for.
        opened: the depths that are known by their bounds; those that come to be chosen are opened.
        room: for the knapsack.
        counts: by depth, what the formula allows a pipeline; to be replaced where that has been opened.
        numbers: by depth, how many pipelines; to be filled in.
        missing: which of the bounds is not known, depth and window; filled in where -1 is returned.
    """
    while True:
        for depth in range(len(counts)):
            if opened[depth]:
                if not plain.guess[depth]:
                    plain.guess[depth] = recomputing.guess[depth] = counts[depth]
                count, window = _most(plain, depth, limit_s, enough[depth])
                if count == _MISSING:
                    missing[0], missing[1], missing[2] = 0, depth, window
                    return _MISSING
                # Only where memory does not allow it otherwise can a pipeline that computes more finish more.
                if count < enough[depth] and count + 1 <= limit_s * rates[depth]:
                    more, window = _most(recomputing, depth, limit_s, enough[depth])
                    if more == _MISSING:
                        missing[0], missing[1], missing[2] = 1, depth, window
                        return _MISSING
                    count = max(count, more)
                counts[depth] = count
        total = _mixed(counts, fewest, room, numbers)
        fresh = False
        if total >= wanted:
            for depth in range(len(counts)):
                if numbers[depth] and not opened[depth]:
                    opened[depth] = fresh = True
        if not fresh:
            return total


@lean_part
def _mixed(counts: Integers, fewest: int, room: Room, numbers: Integers) -> int:
    """The most that pipelines can do together, and how many there are of each depth."""
    items = 0
    for depth in range(len(counts)):
        numbers[depth] = 0
        if counts[depth] > 0:
            room.sizes[items], room.worth[items] = depth + 1, counts[depth]
            items += 1
    if not items:
        return 0
    most = min(len(room.chosen), (room.best.shape[1] - 1) // room.sizes[0])
    number = _fill_by_number(room.sizes[:items], room.worth[:items], fewest, room.best, room.chosen[:most])
    total, left = 0, room.best.shape[1] - 1
    for place in range(number - 1, -1, -1):
        item = room.chosen[place, left]
        numbers[room.sizes[item] - 1] += 1
        total += room.worth[item]
        left -= room.sizes[item]
    return total


@lean_part
def _fill_by_number(sizes: Integers, worth: Integers, fewest: int, best: Integers, chosen: Integers) -> int:
    """Fill in what so many items are worth together at the most, by number of items and workers that they may take.

    Args:
        sizes, worth: of items; sizes ascend.
        fewest: how many items there have to be.
        best: room for two rows, by workers.
        chosen: by number of items less one and workers, the index of the last item; to be filled in.

    Returns:
        With how many items all workers do most; zero where there is no way.
    """
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


@lean_part
def _most(least: Least, depth: int, limit_s: float, enough: int) -> tuple[int, int]:
    """The most micro-batches, up to `enough`, that the bound does not rule out; or -1 and the window that is missing.

    Times grow with micro-batches: window by window to where they pass the limit.
    """
    width = least.time_s.shape[1] // least.known.shape[1]
    low, high, step = 0, enough, 1
    at = min(max(least.guess[depth], 1), enough)
    passed = failed = False
    while low < high:
        window = (at - 1) // width
        if not least.known[depth, window]:
            return _MISSING, window
        first, last = window * width, min((window + 1) * width, enough)
        count = first
        while count < last and least.time_s[depth, count] <= limit_s:
            count += 1
        if count == first:
            high, failed = first, True
        elif count == last:
            low, passed = last, True
        else:
            low = high = count
        if passed and failed:
            at = (low + high + 1) // 2
        else:
            at = min(low + step, high) if passed else max(high - step + 1, 1)
        step *= 2
    least.guess[depth] = low
    return low, 0
