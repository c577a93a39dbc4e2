"""The inner loops of `search._depth_mixes`, compiled by numba: arrays by depth of a pipeline, less one."""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Booleans, Floats, Integers
from chameleon_ft.search._closed_form_kernel import Formula, most_possible_of

_ROUNDING: Final = 1e-12
_MISSING: Final = -1
# Of items that do not fit, less than nothing.
_NONE: Final = -(2**40)
_LARGEST: Final = sys.float_info.max


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


class Depths(NamedTuple):
    """What mixes of pipelines are made of, by depth where nothing else is said.

    Attributes:
        plain, recomputing: bounds.
        formula: no tighter than bounds, and found at once.
        rates: micro-batches for each second that nobody who recomputes can pass.
        micro_batches: all of them.
        fewest: pipelines; the most are those that there is room for.
        active: one for the depths to go on with, zero for others.
        opened: those that are known by their bounds; those that come to be chosen are opened.
        room: for the knapsack.
        guess: what the formula allowed last time.
        enough: room for what is not worth to be passed.
        missing: which of the bounds is not known, depth and window; filled in where -1 is returned.
    """

    plain: Least
    recomputing: Least
    formula: Formula
    rates: Floats
    micro_batches: int
    fewest: int
    active: Integers
    opened: Booleans
    room: Room
    guess: Integers
    enough: Integers
    missing: Integers


class Replayed(NamedTuple):
    """Pipelines that have been replayed: how deep they are, less one, their micro-batches, and seconds."""

    depths: Integers
    counts: Integers
    time_s: Floats


class Made(NamedTuple):
    """A mix by depth: the micro-batches of a pipeline, and how many pipelines there are."""

    counts: Integers
    numbers: Integers


@lean_kernel
def best_of_depths(depths: Depths, replayed: Replayed, time_s: float, wanted: int, made: Made) -> int:
    """The most micro-batches that so many pipelines can finish by `time_s`; -1 where a bound is missing.

    Args:
        depths: see above; none that has been replayed and took longer is thought of.
        replayed: see above.
        time_s: seconds.
        wanted: if less than that comes out, it does not matter how.
        made: of what; to be filled in.
    """
    return _best_by(depths, replayed, time_s, wanted, made)


@lean_kernel
def narrow(depths: Depths, replayed: Replayed, precision: float, within_s: Floats, made: Made, best: Made) -> bool:
    """Halve the time in which all micro-batches can be finished; returns whether that is done, or a bound is missing.

    Args:
        depths, replayed: see above.
        precision: how close to each other both ends are to come, as a share of the later.
        within_s: from when to when; to be made closer.
        made: room to work in.
        best: what finishes them at the later end; to be filled in wherever that is moved.
    """
    while within_s[1] - within_s[0] > precision * within_s[1]:
        middle = (within_s[0] + within_s[1]) / 2
        total = _best_by(depths, replayed, middle, depths.micro_batches, made)
        if total == _MISSING:
            return False
        if total >= depths.micro_batches:
            within_s[1] = middle
            for depth in range(len(made.counts)):
                best.counts[depth], best.numbers[depth] = made.counts[depth], made.numbers[depth]
        else:
            within_s[0] = middle
    return True


@lean_part
def _best_by(depths: Depths, replayed: Replayed, time_s: float, wanted: int, made: Made) -> int:
    plain, recomputing, rates, room = depths.plain, depths.recomputing, depths.rates, depths.room
    enough, opened, missing, counts, numbers = depths.enough, depths.opened, depths.missing, made.counts, made.numbers
    for depth in range(len(counts)):
        enough[depth] = depths.active[depth] * depths.micro_batches
        counts[depth] = 0
        if depths.active[depth]:
            depths.guess[depth] = most_possible_of(depths.formula, depth, time_s * (1 + _ROUNDING), depths.guess[depth])
            counts[depth] = depths.guess[depth]
    for place in range(len(replayed.depths)):
        if replayed.time_s[place] > time_s:
            depth = replayed.depths[place]
            enough[depth] = min(enough[depth], replayed.counts[place] - 1)
    # Where memory forbids it, it takes for ever.
    limit_s = min(time_s * (1 + _ROUNDING), _LARGEST)
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
        total = _mixed(counts, depths.fewest, room, numbers)
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
