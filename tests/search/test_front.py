"""The front of many figures, against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.search import pareto_front

figures = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(figures))
def test_the_front_holds_exactly_the_items_that_no_other_beats(items: list[tuple[int, int, int]]) -> None:
    kept = pareto_front(items, lambda each: each)
    beaten = {a for a in items for b in items if b != a and all(x <= y for x, y in zip(b, a, strict=True))}
    assert kept == sorted(set(items) - beaten)


def test_of_equals_the_first_is_kept() -> None:
    assert pareto_front(["aa", "b", "cc", "d"], lambda each: (len(each),)) == ["b"]
