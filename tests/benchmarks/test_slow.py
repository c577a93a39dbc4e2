"""The counts of the benchmark of slow workers: reports, spells, and steps until they are noticed."""

from __future__ import annotations

import random

from benchmarks._slow_cases import STEPS, Case, Spell, draw_case, observe

QUIET = [[1.0]]


def test_spells_that_are_noticed_in_time_are_counted() -> None:
    case = Case((Spell(3, 0.5, 20, 50), Spell(5, 0.7, 30, STEPS)))
    found = observe(case, QUIET, random.Random(0), workers=8)
    assert (found.reports, found.right, found.spells, found.noticed) == (2, 2, 2, 2)
    assert set(found.delays) == {4}
    assert max(map(abs, found.errors)) < 0.02


def test_a_report_of_a_worker_that_is_not_slow_is_wrong() -> None:
    noise = [[1.0] * 50 + [2.0] * 50, *[[1.0]] * 30]
    found = observe(Case(()), noise, random.Random(3), workers=32)
    assert found.reports > found.right == 0


def test_drawn_spells_are_long_enough_to_be_noticed() -> None:
    rng = random.Random(0)
    spells = [each for _ in range(100) for each in draw_case(rng, workers=32).spells]
    assert min(each.end - each.first for each in spells) >= 20
    assert {0.5 <= each.factor <= 0.9 for each in spells} == {True}
