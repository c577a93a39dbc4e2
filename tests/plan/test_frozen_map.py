"""Mappings that cannot change."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.plan.frozen_map import FrozenMap, updated, without


def test_it_is_a_copy_that_cannot_change() -> None:
    source = {2: "b", 1: "a"}
    frozen = FrozenMap(source)
    source[3] = "c"
    assert list(frozen.items()) == [(2, "b"), (1, "a")]
    assert (list(frozen.keys()), list(frozen.values()), 1 in frozen, frozen.get(3)) == ([2, 1], ["b", "a"], True, None)
    with pytest.raises(AttributeError, match="cannot change"):
        frozen.more = 1


def test_records_that_pass_one_on_share_it() -> None:
    frozen = FrozenMap({1: "a"})
    assert FrozenMap(frozen) is frozen


def test_it_compares_like_a_dict() -> None:
    frozen = FrozenMap({1: "a", 2: "b"})
    assert frozen == {2: "b", 1: "a"} == frozen
    assert frozen == FrozenMap({2: "b", 1: "a"})
    assert hash(frozen) == hash(FrozenMap({2: "b", 1: "a"}))
    assert frozen != {1: "a"}
    assert frozen != "ab"
    assert pickle.loads(pickle.dumps(frozen)) == frozen


@pytest.mark.parametrize("mapping", [{2: "b", 1: "a"}, FrozenMap({2: "b", 1: "a"})])
def test_a_changed_copy_keeps_places_and_adds_at_the_end(mapping: dict[int, str]) -> None:
    after = updated(mapping, {3: "c", 2: "B"})
    assert isinstance(after, FrozenMap)
    assert list(after.items()) == [(2, "B"), (1, "a"), (3, "c")]
    assert list(mapping.items()) == [(2, "b"), (1, "a")]


@pytest.mark.parametrize("mapping", [{2: "b", 1: "a"}, FrozenMap({2: "b", 1: "a"})])
def test_a_copy_without_a_key_keeps_the_others(mapping: dict[int, str]) -> None:
    after = without(mapping, 2)
    assert list(after.items()) == [(1, "a")]
    assert without(after, 2) is after
    assert list(mapping.items()) == [(2, "b"), (1, "a")]


changes = st.lists(
    st.tuples(st.integers(0, 5), st.dictionaries(st.integers(0, 60), st.integers(0, 1), max_size=40)), max_size=12
)


@given(changes)
def test_maps_of_one_origin_compare_like_dicts(steps: list[tuple[int, dict[int, int]]]) -> None:
    """Each step changes one of the maps that were made before."""
    maps = [FrozenMap(dict.fromkeys(range(60), 0))]
    for place, change in steps:
        maps.append(updated(maps[place % len(maps)], change))
    for one in maps:
        for other in maps:
            assert (one == other) == (dict(one) == dict(other))
