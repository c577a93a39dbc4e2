"""Knapsacks against trying every number of every item."""

from __future__ import annotations

import math
from functools import cache
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.search import knapsack
from chameleon_ft.search.knapsack import Size, best_mix
from tests.examples import examples


def brute_force(values: dict[Size, int], counts: tuple[int, ...], pipeline_range: tuple[int, int] | None = None) -> int:
    @cache
    def most(left: tuple[int, ...], items: int) -> float:
        if not items:
            return 0
        best = -math.inf
        for size, value in values.items():
            rest = tuple(have - taken for have, taken in zip(left, size, strict=True))
            if value and min(rest) >= 0:
                best = max(best, value + most(rest, items - 1))
        return best

    fewest, last = pipeline_range or (0, sum(counts))
    return int(max(0, *(most(counts, items) for items in range(fewest, last + 1))))


def worth(mix: dict[Size, int], values: dict[Size, int]) -> int:
    return sum(values[size] * number for size, number in mix.items())


def fits(mix: dict[Size, int], counts: tuple[int, ...]) -> bool:
    used = (sum(size[kind] * number for size, number in mix.items()) for kind in range(len(counts)))
    return all(map(int.__le__, used, counts))


sizes = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any)
ranges = st.none() | st.tuples(st.integers(1, 6), st.integers(0, 3)).map(lambda own: (own[0], own[0] + own[1]))


@given(
    values=st.dictionaries(sizes, st.integers(0, 9), max_size=6),
    counts=st.tuples(*[st.integers(0, 6)] * 2),
    pipeline_range=ranges,
)
def test_workers_of_two_classes(
    values: dict[Size, int], counts: tuple[int, int], pipeline_range: tuple[int, int] | None
) -> None:
    found = best_mix(values, counts, pipeline_range)
    assert found.bound == brute_force(values, counts, pipeline_range) == worth(found.mix, values)
    assert fits(found.mix, counts)


@given(
    values=st.dictionaries(st.tuples(st.integers(1, 9)), st.integers(0, 30), max_size=6),
    count=st.integers(1, 40),
    pipeline_range=ranges,
)
def test_workers_of_one_class(values: dict[Size, int], count: int, pipeline_range: tuple[int, int] | None) -> None:
    found = best_mix(values, (count,), pipeline_range)
    assert found.bound == brute_force(values, (count,), pipeline_range) == worth(found.mix, values)
    assert fits(found.mix, (count,))


@given(
    values=st.dictionaries(sizes, st.integers(0, 9), max_size=6),
    counts=st.tuples(*[st.integers(0, 6)] * 2),
    pipeline_range=ranges,
)
def test_no_worker_is_idle_where_all_have_to_be_used(
    values: dict[Size, int], counts: tuple[int, int], pipeline_range: tuple[int, int] | None
) -> None:
    found = best_mix(values, counts, pipeline_range, all_workers=True)

    @cache
    def most(left: tuple[int, ...], items: int) -> float:
        if not items:
            return -math.inf if any(left) else 0
        rests = {size: tuple(map(int.__sub__, left, size)) for size in values if values[size]}
        own = (values[size] + most(rest, items - 1) for size, rest in rests.items() if min(rest) >= 0)
        return max(own, default=-math.inf)

    fewest, last = pipeline_range or (0, sum(counts))
    best = max(0, *(most(counts, items) for items in range(fewest, last + 1)))
    assert found.bound == best == worth(found.mix, values)
    if found.mix:
        assert tuple(sum(size[kind] * n for size, n in found.mix.items()) for kind in range(2)) == counts


@given(
    values=st.dictionaries(st.tuples(st.integers(1, 9)), st.integers(0, 30), max_size=6),
    count=st.integers(1, 40),
    fewest=st.integers(1, 8),
    more=st.integers(0, 4),
)
def test_the_hull_bounds_a_number_of_items_where_a_table_would_be_large(
    values: dict[Size, int], count: int, fewest: int, more: int
) -> None:
    pipeline_range = fewest, fewest + more
    with mock.patch.object(knapsack, "_NUMBERED_TABLE", 0):
        found = best_mix(values, (count,), pipeline_range)
    best = brute_force(values, (count,), pipeline_range)
    assert worth(found.mix, values) <= best <= found.bound
    if found.mix:
        assert fewest <= sum(found.mix.values()) <= fewest + more
        assert fits(found.mix, (count,))
        own = [size for (size,) in found.made_of]
        if max(own) - min(own) <= 1:
            assert worth(found.mix, values) == found.bound


@settings(max_examples=examples(40), deadline=None)
@given(
    values=st.dictionaries(sizes, st.integers(1, 9), min_size=1, max_size=6),
    counts=st.tuples(*[st.integers(0, 9)] * 2),
    pipeline_range=ranges,
)
def test_the_integer_program_bounds_many_workers_of_several_classes(
    values: dict[Size, int], counts: tuple[int, int], pipeline_range: tuple[int, int] | None
) -> None:
    with mock.patch.multiple(knapsack, _NUMBERED_TABLE=0, _TABLE=0):
        found = best_mix(values, counts, pipeline_range)
    best = brute_force(values, counts, pipeline_range)
    assert worth(found.mix, values) <= best <= found.bound
    assert fits(found.mix, counts)
