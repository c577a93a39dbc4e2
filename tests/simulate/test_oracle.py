"""Known rates: more or faster workers reach the rates of fewer and slower ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.account import KnownRates, live_of
from tests.golden import refused

WORKERS = st.lists(st.sampled_from([0.5, 0.8, 1.0]), min_size=1, max_size=5)


def test_more_workers_are_never_slower() -> None:
    known = KnownRates()
    known.note(live_of([1.0] * 4), 10.0)
    known.note(live_of([1.0] * 5), 8.0)
    assert [known.best(live_of([1.0] * count)) for count in (3, 4, 5, 6)] == [0.0, 10.0, 10.0, 10.0]


@given(noted=st.lists(st.tuples(WORKERS, st.floats(0.1, 9.0)), max_size=6), asked=WORKERS)
def test_the_best_rate_is_that_of_any_workers_that_are_covered(
    noted: list[tuple[list[float], float]], asked: list[float]
) -> None:
    known = KnownRates()
    for workers, rate in noted:
        known.note(live_of(workers), rate)

    def fits(workers: list[float]) -> bool:
        pairs = zip(sorted(workers, reverse=True), sorted(asked, reverse=True), strict=False)
        return len(workers) <= len(asked) and all(need <= has for need, has in pairs)

    assert known.best(live_of(asked)) == max((rate for workers, rate in noted if fits(workers)), default=0.0)


def test_a_rate_must_be_positive() -> None:
    with refused(ConfigError):
        KnownRates().note(live_of([1.0]), 0.0)
