"""Which pipelines to make of the workers so that together they finish most: an unbounded knapsack.

An item takes workers (how many of each kind) and is worth the micro-batches that it finishes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

# Workers of each kind that an item takes.
Size = tuple[int, ...]
# How many of each item.
Mix = dict[Size, int]

# Up to so many table entries times items the table is made at once; it is exact and needs no argument.
_SMALL: Final = 4_000
# The most entries of a table for workers of several kinds; the rest of them are dealt out beforehand.
_STATES: Final = 500
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True)
class BoundedMix:
    """A mix, what no mix can be worth more than, and the items that this bound is made of."""

    bound: int
    mix: Mix
    made_of: tuple[Size, ...]


def best_mix(values: Mapping[Size, int], counts: Sequence[int]) -> BoundedMix:
    """The items that are worth most together; exact for workers of one kind.

    For several kinds it is exact up to some hundreds of ways to take workers out of `counts`. Beyond that most workers
    of each kind are dealt out to the items of their own kind that are worth most for each worker; see `is_exact`.
    """
    useful = {size: value for size, value in values.items() if value > 0}
    if not useful:
        return BoundedMix(0, {}, ())
    if len(counts) == 1:
        total, own = _of_one_kind({size: value for (size,), value in useful.items()}, counts[0])
        mix: Mix = {(size,): count for size, count in own.items()}
    elif is_exact(counts):
        total, mix = _by_table(useful, counts)
    else:
        total, mix = _mostly_of_one_kind(useful, counts)
    return BoundedMix(total, mix, tuple(mix))


def is_exact(counts: Sequence[int]) -> bool:
    """Whether the best mix of so many workers of each kind is found for certain, so that its worth is a bound."""
    return len(counts) == 1 or math.prod(count + 1 for count in counts) <= _STATES


def mix_of_number(values: Mapping[Size, int], count: int, fewest: int, most: int) -> BoundedMix:
    """The same for workers of one kind and from `fewest` to `most` items.

    The bound is that of parts of items, which is met on the corners of the upper hull of all items: by two neighbouring
    ones. The mix is made of those two, with one item between them for the workers that are left over; it is worth as
    much as the bound says where sizes of the two differ by one. Where there is room for tables, `DepthMixes` is exact.
    """
    items = {size: value for (size,), value in values.items() if 0 < size <= count and value > 0}
    most = min(most, count // min(items)) if items else 0
    if most < fewest:
        return BoundedMix(0, {}, ())
    corners = _hull(items)
    # More items are worth more until all are of the size that is worth most for each worker; the bound is concave.
    size, _ = max(corners, key=lambda corner: corner[1] / corner[0])
    numbers = {min(max(number, fewest), most) for number in (count // size, count // size + 1)}
    return max((_of_number(items, corners, count, number) for number in sorted(numbers)), key=lambda found: found.bound)


def _of_number(values: Mapping[int, int], corners: Sequence[tuple[int, int]], count: int, number: int) -> BoundedMix:
    mean = count / number
    above = next((place for place, (size, _) in enumerate(corners) if size >= mean), len(corners) - 1)
    high, worth_high = corners[above]
    if high <= mean:
        return BoundedMix(number * worth_high, {(high,): number}, ((high,),))
    low, worth_low = corners[above - 1]
    slope = (worth_high - worth_low) / (high - low)
    bound = math.floor(number * (worth_low + (mean - low) * slope) * (1 + _ROUNDING))
    large = (count - low * number) // (high - low)
    mix = {low: number - large, high: large}
    left = count - low * (number - large) - high * large
    between = max((size for size in values if low < size <= low + left), key=values.__getitem__, default=low)
    if values[between] > worth_low:
        mix[low] -= 1
        mix[between] = mix.get(between, 0) + 1
    return BoundedMix(bound, {(size,): items for size, items in mix.items() if items}, ((low,), (high,)))


def _hull(values: Mapping[int, int]) -> list[tuple[int, int]]:
    """The corners of the upper hull of the items from the smallest to the first of the most worth, by size."""
    corners: list[tuple[int, int]] = []
    for size, value in sorted(values.items()):
        if corners and value <= corners[-1][1]:
            continue
        while len(corners) > 1:
            (first, worth_first), (second, worth_second) = corners[-2:]
            if (worth_second - worth_first) * (size - first) > (value - worth_first) * (second - first):
                break
            corners.pop()
        corners.append((size, value))
    return corners


def _of_one_kind(values: Mapping[int, int], count: int) -> tuple[int, dict[int, int]]:
    if (count + 1) * len(values) <= _SMALL:
        return _filled(values, count)
    return _by_remainder(values, count) or _filled(values, count)


def _filled(values: Mapping[int, int], count: int) -> tuple[int, dict[int, int]]:
    """By table over the number of workers."""
    best = [0] * (count + 1)
    chosen = [0] * (count + 1)
    items = sorted(values.items())
    for used in range(1, count + 1):
        most, taken = best[used - 1], 0
        for size, value in items:
            if size > used:
                break
            if best[used - size] + value > most:
                most, taken = best[used - size] + value, size
        best[used], chosen[used] = most, taken
    mix: dict[int, int] = {}
    left = count
    while left:
        taken = chosen[left]
        if taken:
            mix[taken] = mix.get(taken, 0) + 1
        left -= taken or 1
    return best[count], mix


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to reach a remainder: what is lost by it, the workers it takes, its last item (an idle worker is one)."""

    lost: int
    size: int
    item: int
    idle: bool

    def better_than(self, other: _Way | None) -> bool:
        return other is None or (self.lost, self.size) < (other.lost, other.size)


def _by_remainder(values: Mapping[int, int], count: int) -> tuple[int, dict[int, int]] | None:
    """As many of the item that is worth most for each worker as possible, and the best choice for what remains.

    Measured against that item, of size P, every other loses something. Of P others some add up to a multiple of P and
    can be replaced by it without loss, so fewer than P others are needed: those that lose least for the remainder of
    `count` modulo P. Finding them is a shortest path over P remainders, whatever `count` is. None when they take more
    workers than there are.
    """
    size = min(values, key=lambda each: (-values[each] / each, each))
    value = values[size]
    ways: list[_Way | None] = [_Way(0, 0, 0, False), *[None] * (size - 1)]
    items = [(1, value, True)] + [
        (each, each * value - values[each] * size, False) for each in sorted(values) if each != size
    ]
    for each, lost, idle in items:
        step = each % size
        circles = math.gcd(step, size)
        for first in range(circles):
            at = first
            # Twice round, for the best remainder to start from may be met late in the first round.
            for _ in range(2 * (size // circles)):
                here, after = ways[at], (at + step) % size
                if here is not None:
                    way = _Way(here.lost + lost, here.size + each, each, idle)
                    if way.better_than(ways[after]):
                        ways[after] = way
                at = after
    mix: dict[int, int] = {}
    left = count
    at = count % size
    while (last := ways[at]) is not None and last.item:
        left -= last.item
        if not last.idle:
            mix[last.item] = mix.get(last.item, 0) + 1
        at = (at - last.item) % size
    if left < 0:
        return None
    if left >= size:
        mix[size] = mix.get(size, 0) + left // size
    return sum(values[each] * number for each, number in mix.items()), mix


def _by_table(values: Mapping[Size, int], counts: Sequence[int]) -> tuple[int, Mix]:
    """By table over the workers of each kind that are used."""
    strides = [1] * len(counts)
    for kind in range(len(counts) - 1, 0, -1):
        strides[kind - 1] = strides[kind] * (counts[kind] + 1)
    items = [
        (size, value, sum(s * stride for s, stride in zip(size, strides, strict=True)))
        for size, value in sorted(values.items())
        if all(s <= count for s, count in zip(size, counts, strict=True))
    ]
    best: list[int] = []
    chosen: list[int] = []
    for index, used in enumerate(product(*(range(count + 1) for count in counts))):
        most, taken = 0, -1
        for kind, number in enumerate(used):
            if number and best[index - strides[kind]] > most:
                most, taken = best[index - strides[kind]], -2 - kind
        for number, (size, value, offset) in enumerate(items):
            if offset <= index and best[index - offset] + value > most and all(map(int.__le__, size, used)):
                most, taken = best[index - offset] + value, number
        best.append(most)
        chosen.append(taken)
    mix: Mix = {}
    index = len(best) - 1
    while (taken := chosen[index]) != -1:
        if taken >= 0:
            size, _, offset = items[taken]
            mix[size] = mix.get(size, 0) + 1
            index -= offset
        else:
            index -= strides[-2 - taken]
    return best[-1], mix


def _mostly_of_one_kind(values: Mapping[Size, int], counts: Sequence[int]) -> tuple[int, Mix]:
    """Workers of each kind to their best item, all but a few, which are dealt out by table with all items."""
    left = list(counts)
    mix: Mix = {}
    room = int(_STATES ** (1 / len(counts))) - 1
    for kind, count in enumerate(counts):
        pure = {size: value for size, value in values.items() if size[kind] and sum(size) == size[kind]}
        if not pure:
            continue
        size = max(pure, key=lambda each: (pure[each] / sum(each), -sum(each)))
        depth = size[kind]
        number = max(0, count - max(room, depth) + depth - 1) // depth
        if number:
            mix[size] = number
            left[kind] -= number * depth
    # What no item of its own kind can use is idle beyond what the table can hold.
    left = [min(each, max(room, 1)) for each in left]
    _, rest = _by_table(values, left)
    for size, number in rest.items():
        mix[size] = mix.get(size, 0) + number
    return sum(values[size] * number for size, number in mix.items()), mix
