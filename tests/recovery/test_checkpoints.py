"""Intervals between checkpoints against a search for the best one."""

from __future__ import annotations

import math
import random

import pytest

from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery.checkpoints import Checkpoints, daly_interval_s, expected_unsaved_s
from tests.golden import refused


def time_of_work_s(interval_s: float, write_s: float, mtbf_s: float) -> float:
    """Expected seconds for each second of work, failures at any time, without a restart's own time (Daly 2006)."""
    return mtbf_s * math.expm1((interval_s + write_s) / mtbf_s) / interval_s


@pytest.mark.parametrize(("write_s", "mtbf_s"), [(1.0, 50_000.0), (30.0, 3_600.0), (5.0, 100.0)])
def test_no_interval_is_much_better_than_dalys(write_s: float, mtbf_s: float) -> None:
    intervals = [1.01**power for power in range(-200, 1_100) if 1.01**power < 20 * mtbf_s]
    best_s = min(time_of_work_s(interval_s, write_s, mtbf_s) for interval_s in intervals)
    assert time_of_work_s(daly_interval_s(write_s, mtbf_s), write_s, mtbf_s) <= best_s * 1.0005


def test_it_is_youngs_interval_if_failures_are_rare() -> None:
    assert daly_interval_s(1.0, 1e8) == pytest.approx(math.sqrt(2 * 1e8), rel=1e-4)


def test_where_a_checkpoint_takes_longer_than_failures_are_apart() -> None:
    assert daly_interval_s(100.0, 10.0) == 10.0


def test_times_that_cannot_be() -> None:
    with refused(ConfigError):
        daly_interval_s(1.0, 0.0)
    with refused(ConfigError):
        daly_interval_s(-1.0, 10.0)
    with refused(ConfigError):
        Checkpoints(unsaved_s=-1.0)


@pytest.mark.parametrize(
    ("unsaved_s", "interval_s", "mean_gap_s"),
    [(0.0, 100.0, 30.0), (90.0, 100.0, 30.0), (40.0, 100.0, 1e6), (0.0, 1e9, 50.0)],
)
def test_work_since_the_last_checkpoint_is_the_mean_over_drawn_waits(
    unsaved_s: float, interval_s: float, mean_gap_s: float
) -> None:
    generator = random.Random(1)
    drawn = [(unsaved_s + generator.expovariate(1 / mean_gap_s)) % interval_s for _ in range(100_000)]
    expected_s = expected_unsaved_s(unsaved_s, interval_s, mean_gap_s)
    assert expected_s == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert 0 <= expected_unsaved_s(unsaved_s, interval_s, 1e-6) <= interval_s


def test_checkpoints_are_written_whenever_that_pays_or_at_fixed_intervals() -> None:
    fixed = Checkpoints(longest_s=3_600.0)
    adapted = Checkpoints(longest_s=3_600.0, write_s=1.0)
    for return_gap_s, interval_s in ((10_000.0, daly_interval_s(1.0, 10_000.0)), (1e9, 3_600.0), (math.inf, 3_600.0)):
        assert fixed.interval_s(step_s=2.0, return_gap_s=return_gap_s) == 3_600.0
        assert adapted.interval_s(step_s=2.0, return_gap_s=return_gap_s) == interval_s
    assert adapted.interval_s(step_s=200.0, return_gap_s=10_000.0) == 200.0
