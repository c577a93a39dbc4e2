from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.quantities import counted, data_size, duration, in_ranges, listed, rate

SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "days": 86_400.0}
BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (2.5e-8, "25 ns"),
        (3.76e-5, "37.6 µs"),
        (9.996e-4, "1 ms"),
        (0.3254, "325 ms"),
        (0.9996, "1.000 s"),
        (1.2041, "1.204 s"),
        (57.8, "57.80 s"),
        (109.04, "109.0 s"),
        (1_000.0, "16.7 min"),
        (7_200.0, "2.0 h"),
        (1_287_360.0, "14.9 days"),
        (-0.134, "-134 ms"),
    ],
)
def test_a_time_is_in_the_unit_that_reads_best(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (11_534_336, "11.5 MB"),
        (80 * 10**9, "80.0 GB"),
        (174_508_800_000, "174.5 GB"),
        (-1_500, "-1.5 kB"),
    ],
)
def test_a_size_is_in_the_unit_that_reads_best(num_bytes: int, words: str) -> None:
    assert data_size(num_bytes) == words


@given(st.floats(1e-8, 1e9))
def test_what_is_read_is_the_time(seconds: float) -> None:
    match = re.fullmatch(r"([\d,.]+) (\w+)", duration(seconds))
    assert match
    assert float(match[1].replace(",", "")) * SECONDS[match[2]] == pytest.approx(seconds, rel=0.03)


@given(st.integers(1, 10**18))
def test_what_is_read_is_the_size(num_bytes: int) -> None:
    match = re.fullmatch(r"([\d,.]+) (\w+)", data_size(num_bytes))
    assert match
    assert float(match[1].replace(",", "")) * BYTES[match[2]] == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("per_s", "words"),
    [
        (0.0, "0.000"),
        (49.0, "49.00"),
        (0.033246, "0.03325"),
        (58.094, "58.09"),
        (100.0, "100.0"),
        (12_345.6, "12,345.6"),
    ],
)
def test_a_rate_has_four_digits_or_more(per_s: float, words: str) -> None:
    assert rate(per_s) == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([], ""), ([7], "7"), ([3, 4], "3-4"), ([5, 0, 2, 1], "0-2, 5"), ([1, 3, 5], "1, 3, 5"), ([9, 9, 10], "9-10")],
)
def test_numbers_without_a_gap_are_a_range(numbers: list[int], words: str) -> None:
    assert in_ranges(numbers) == words


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, in_ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


def test_a_count_has_its_noun_in_the_plural_but_for_one() -> None:
    assert [counted(number, "step") for number in (0, 1, 1_200)] == ["0 steps", "1 step", "1,200 steps"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), "no worker"), ((3,), "worker 3"), ((3, 1), "workers 3, 1"), ([0, 1, 2], "workers 0, 1, 2")],
)
def test_things_are_listed_by_their_numbers(numbers: list[int], text: str) -> None:
    assert listed("worker", numbers) == text
