"""Knapsacks against trying every number of every item."""

from __future__ import annotations

import math
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.search._mix import Size, _by_remainder, _filled, _mostly_of_one_kind, best_mix, mix_of_number


def brute_force(values: dict[Size, int], counts: tuple[int, ...]) -> int:
    @cache
    def most(left: tuple[int, ...]) -> int:
        best = 0
        for size, value in values.items():
            rest = tuple(have - taken for have, taken in zip(left, size, strict=True))
            if min(rest) >= 0:
                best = max(best, value + most(rest))
        return best

    return most(counts)


def worth(mix: dict[Size, int], values: dict[Size, int]) -> int:
    return sum(values[size] * number for size, number in mix.items())


def used(mix: dict[Size, int], kinds: int) -> tuple[int, ...]:
    return tuple(sum(size[kind] * number for size, number in mix.items()) for kind in range(kinds))


sizes = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any)


@given(values=st.dictionaries(sizes, st.integers(0, 9), max_size=6), counts=st.tuples(*[st.integers(0, 7)] * 2))
def test_two_kinds(values: dict[Size, int], counts: tuple[int, int]) -> None:
    found = best_mix(values, counts)
    assert found.bound == brute_force(values, counts) == worth(found.mix, values)
    assert all(map(int.__le__, used(found.mix, 2), counts))


@given(
    values=st.dictionaries(st.tuples(st.integers(1, 9)), st.integers(0, 30), max_size=6),
    count=st.integers(1, 40),
    fewest=st.integers(1, 8),
    more=st.integers(0, 4),
)
def test_a_given_number_of_items(values: dict[Size, int], count: int, fewest: int, more: int) -> None:
    @cache
    def most(left: int, items: int) -> float:
        if not items:
            return 0
        rest = (value + most(left - size, items - 1) for (size,), value in values.items() if value and size <= left)
        return max(rest, default=-math.inf)

    found = mix_of_number(values, count, fewest, fewest + more)
    best = max(0, *(most(count, items) for items in range(fewest, fewest + more + 1)))
    assert worth(found.mix, values) <= best <= found.bound
    if found.mix:
        assert fewest <= sum(found.mix.values()) <= fewest + more
        assert used(found.mix, 1) <= (count,)
        sizes = [size for (size,) in found.made_of]
        if max(sizes) - min(sizes) <= 1:
            assert worth(found.mix, values) == found.bound


@given(values=st.dictionaries(st.integers(1, 9), st.integers(1, 30), min_size=1, max_size=6), count=st.integers(0, 300))
def test_remainders_and_the_table_agree(values: dict[int, int], count: int) -> None:
    total, mix = _filled(values, count)
    assert total == sum(values[size] * number for size, number in mix.items())
    assert sum(size * number for size, number in mix.items()) <= count
    found = _by_remainder(values, count)
    if found is None:
        # Fewer than a best item's size of others, each as large as the largest, may not fit.
        assert count < max(values) ** 2
        return
    assert found[0] == total == sum(values[size] * number for size, number in found[1].items())
    assert sum(size * number for size, number in found[1].items()) <= count


@given(
    values=st.dictionaries(sizes, st.integers(1, 9), min_size=1, max_size=6),
    counts=st.tuples(st.integers(0, 400), st.integers(0, 400)),
)
def test_many_of_two_kinds_are_not_used_twice(values: dict[Size, int], counts: tuple[int, int]) -> None:
    total, mix = _mostly_of_one_kind(values, counts)
    assert total == worth(mix, values)
    assert all(map(int.__le__, used(mix, 2), counts))
