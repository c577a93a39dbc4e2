"""The figures of traces that are small enough to count by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from chameleon_ft.simulate.traces.trace import Fault, trace_statistics
from tests.simulate.traces import DURATION_S, GRID, Case, cases, speeds, trace_of

DAY_S = 86_400.0


def days(workers: tuple[int, ...], start: float, end: float, speed: float = 0.0) -> Fault:
    return Fault(workers, start * DAY_S, end * DAY_S, speed)


def test_a_trace_that_is_counted_by_hand() -> None:
    faults = [
        days((0, 1), 1, 2),  # host 0
        days((2,), 1, 5),  # part of host 1, at the same moment
        days((6, 7), 3, 6),  # host 3
        days((0, 1, 2, 3), 7, 9),  # hosts 0 and 1
        days((4, 5), 9, math.inf),  # host 2, until the end
        days((7,), 8, 10, 0.5),
    ]
    trace = trace_of(faults, workers=8, workers_per_host=2, duration_s=10 * DAY_S)
    found = trace_statistics(trace)
    assert (found.hosts, found.workers, found.duration_days) == (4, 8, 10)
    assert found.faults == 6
    assert found.faults_per_1000_host_days == pytest.approx(1000 * 6 / 40)
    ended = [1, 4, 3, 2, 2]
    assert found.outage_median_days == pytest.approx(np.quantile(ended, 0.5))
    assert found.outage_mean_days == pytest.approx(np.mean(ended))
    assert found.outage_p90_days == pytest.approx(np.quantile(ended, 0.9))
    gaps = [0, 2, 4, 0, 2]
    assert found.gap_variation == pytest.approx(np.std(gaps) / np.mean(gaps))
    assert found.short_gap_share == pytest.approx(2 / 5)
    assert found.max_hosts_down == 2
    assert found.availability == pytest.approx(1 - (2 + 4 + 6 + 8 + 2) / 80)
    assert found.slow_share == pytest.approx(2 / 80)


def test_workers_absent_at_first_are_down_but_no_fault() -> None:
    found = trace_statistics(trace_of([days((0,), 0, 1)], workers=2, duration_s=2 * DAY_S))
    assert (found.faults, found.max_hosts_down, found.availability) == (0, 1, 0.75)


def test_a_trace_without_faults_has_no_outages_and_no_gaps() -> None:
    found = trace_statistics(trace_of([], workers=2))
    assert (found.faults, found.faults_per_1000_host_days, found.max_hosts_down) == (0, 0, 0)
    assert (found.availability, found.slow_share) == (1, 0)
    none = (found.outage_median_days, found.outage_mean_days, found.outage_p90_days, found.gap_variation)
    assert all(math.isnan(value) for value in (*none, found.short_gap_share))


@given(case=cases())
def test_hosts_down_and_shares_match_a_count_of_every_moment(case: Case) -> None:
    found = trace_statistics(case.trace)
    k = case.trace.workers_per_host
    by_moment = [speeds(case.trace, time_s) for time_s in GRID]
    down = [sum(0 in moment[host * k : (host + 1) * k] for host in range(case.trace.hosts)) for moment in by_moment]
    assert found.max_hosts_down == max(down)
    worker_moments = (len(GRID) - 1) * case.trace.workers
    up = sum(speed > 0 for moment in by_moment[:-1] for speed in moment)
    slow = sum(0 < speed < 1 for moment in by_moment[:-1] for speed in moment)
    assert found.availability == pytest.approx(up / worker_moments)
    assert found.slow_share == pytest.approx(slow / worker_moments)
    assert found.duration_days * DAY_S == pytest.approx(DURATION_S)
