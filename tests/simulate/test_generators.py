"""Generated traces against scipy's distributions and against what was measured."""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats import trace_to_jsonl
from chameleon_ft.simulate.traces.generators import (
    MODELS,
    Bursts,
    FaultModel,
    IncidentSizes,
    Poisson,
    Repairs,
    SpotModel,
    Stragglers,
    Weibull,
    generate_trace,
)
from chameleon_ft.simulate.traces.trace import Trace, TraceStatistics, trace_statistics
from tests.golden import refused
from tests.simulate.live import live_at

DAY_S = 86_400.0
SEEDS = range(24)


def small(name: str, seed: int) -> Trace:
    days = 2 if name == "spot" else 60
    return generate_trace(MODELS[name], hosts=20, workers_per_host=4, duration_s=days * DAY_S, seed=seed)


def as_measured(name: str) -> list[TraceStatistics]:
    """The figures of traces of the size of the measured one, InfiniteHBD's 400 nodes and 348 days."""
    return [trace_statistics(generate_trace(MODELS[name], hosts=400, duration_s=348 * DAY_S, seed=s)) for s in SEEDS]


def mean(found: list[TraceStatistics], figure: str) -> float:
    return statistics.fmean(getattr(each, figure) for each in found)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_everything(name: str) -> None:
    assert trace_to_jsonl(small(name, 5)) == trace_to_jsonl(small(name, 5))
    assert small(name, 5).events != small(name, 6).events


def test_another_process_draws_the_same_to_the_bit() -> None:
    code = (
        "import hashlib; from chameleon_ft.simulate.traces.formats import trace_to_jsonl\n"
        "from chameleon_ft.simulate.traces.generators import MODELS, generate_trace\n"
        "trace = generate_trace(MODELS['bursts'], hosts=20, workers_per_host=4, duration_s=60 * 86400.0, seed=5)\n"
        "print(hashlib.sha256(trace_to_jsonl(trace).encode()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(trace_to_jsonl(small("bursts", 5)).encode()).hexdigest()


# Relative tolerances of the mean over the seeds; the figures are those of the whole InfiniteHBD trace.
@pytest.mark.parametrize(
    ("figure", "measured", "tolerance"),
    [
        ("faults_per_1000_host_days", 4.20, 0.03),
        ("outage_median_days", 0.85, 0.05),
        ("outage_mean_days", 5.5, 0.05),
        ("outage_p90_days", 13, 0.07),
        ("gap_variation", 1.76, 0.04),
        ("short_gap_share", 88 / 581, 0.06),
    ],
)
def test_bursts_match_the_measurements(
    bursts: list[TraceStatistics], figure: str, measured: float, tolerance: float
) -> None:
    assert mean(bursts, figure) == pytest.approx(measured, rel=tolerance)


@pytest.fixture(scope="module")
def bursts() -> list[TraceStatistics]:
    return as_measured("bursts")


def test_most_down_at_once_is_near_the_measurement(bursts: list[TraceStatistics]) -> None:
    most = [each.max_hosts_down for each in bursts]
    assert min(most) < 30 < 35 <= max(most)


def test_weibull_gaps_vary_as_measured_but_hardly_come_in_bursts() -> None:
    found = as_measured("weibull")
    assert mean(found, "gap_variation") == pytest.approx(1.76, rel=0.04)
    assert mean(found, "short_gap_share") < 0.08
    assert mean(found, "faults_per_1000_host_days") == pytest.approx(4.2, rel=0.04)


def test_poisson_gaps_are_exponential() -> None:
    starts = [time_s for time_s, _ in Poisson().faults(2e6, 1000, random.Random(3))]
    gaps = np.diff(starts)
    assert len(gaps) > 1900
    assert stats.kstest(gaps, stats.expon(scale=1000).cdf).pvalue > 0.01


@pytest.mark.parametrize("shape", [0.5, 0.8, 1.5, 4.0])
def test_weibull_gaps_match_scipy(shape: float) -> None:
    gaps = np.diff([time_s for time_s, _ in Weibull(shape=shape).faults(2e6, 1000, random.Random(3))])
    wanted = stats.weibull_min(shape, scale=1000 / stats.weibull_min(shape).mean())
    assert stats.kstest(gaps, wanted.cdf).pvalue > 0.01


@pytest.mark.parametrize(("exponent", "largest"), [(1.0, 10), (2.715, 64), (3.9, 64), (2.0, 2)])
def test_incidents_have_the_sizes_of_a_zipf_distribution(exponent: float, largest: int) -> None:
    sizes = IncidentSizes(exponent=exponent, largest=largest)
    wanted = stats.zipfian(exponent, largest)
    assert sizes.mean == pytest.approx(wanted.mean())
    drawn = np.array(list(itertools.islice(sizes.draws(random.Random(1)), 20_000)))
    assert drawn.min() >= 1
    assert drawn.max() <= largest
    for size in range(1, min(largest, 4) + 1):
        assert np.mean(drawn == size) == pytest.approx(wanted.pmf(size), abs=0.01)


@pytest.mark.parametrize("arrivals", [Poisson(), Weibull(), Bursts(), Bursts(sizes=IncidentSizes(exponent=1.5))])
def test_faults_have_the_configured_rate(arrivals: Weibull | Bursts) -> None:
    drawn = [arrivals.faults(1e6, 1000, random.Random(seed)) for seed in range(30)]
    assert statistics.fmean(map(len, drawn)) == pytest.approx(1000, rel=0.05)
    for faults in drawn:
        assert faults == sorted(faults)
        assert all(0 <= time_s < 1e6 for time_s, _ in faults)
        firsts: dict[int, float] = {}
        for time_s, incident in faults:
            assert time_s - firsts.setdefault(incident, time_s) < 300


def test_repairs_are_lognormal_up_to_the_longest() -> None:
    repairs = Repairs(median_days=2.0, spread=1.5, longest_days=20.0)
    generator = random.Random(2)
    drawn = np.array([repairs.draw_s(generator) / DAY_S for _ in range(5000)])
    assert drawn.max() == 20
    wanted = stats.lognorm(1.5, scale=2.0)
    assert np.mean(drawn == 20) == pytest.approx(wanted.sf(20), abs=0.02)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, share) == pytest.approx(wanted.ppf(share), rel=0.12)


def test_a_repair_takes_a_second_at_least() -> None:
    assert Repairs(median_days=1e-9, spread=0).draw_s(random.Random(0)) == 1


def test_a_fault_takes_all_workers_of_its_host() -> None:
    losses = [event.workers for event in small("bursts", 1).events if event.kind == "lost"]
    assert losses
    assert all(len(workers) == 4 and workers[0] % 4 == 0 for workers in losses)


def test_a_share_of_the_faults_takes_single_workers() -> None:
    model = FaultModel(single_share=0.75, faults_per_1000_host_days=100)
    trace = generate_trace(model, hosts=40, workers_per_host=4, duration_s=100 * DAY_S, seed=1)
    sizes = [len(event.workers) for event in trace.events if event.kind == "lost"]
    assert {cause for event in trace.events if (cause := event.cause)} == {"worker", "host"}
    assert sum(size == 1 for size in sizes) / len(sizes) == pytest.approx(0.75, abs=0.05)


def test_an_incident_takes_several_hosts_at_once_and_repairs_them_together() -> None:
    model = FaultModel(
        arrivals=Bursts(sizes=IncidentSizes(exponent=1, largest=3), simultaneous_share=1.0),
        repairs=Repairs(spread=0, together_share=1.0),
    )
    trace = generate_trace(model, hosts=50, duration_s=400 * DAY_S, seed=3)
    groups = [events for _, events in trace.groups() if events[0].kind == "lost"]
    assert {sum(len(event.workers) for event in events) for events in groups} == {1, 2, 3}
    assert {round((f.end_s - f.start_s) / DAY_S, 6) for f in trace.faults() if f.end_s < trace.duration_s} == {0.9}


def test_slow_workers_change_nothing_about_the_losses() -> None:
    stragglers = Stragglers(per_1000_worker_days=5.0, mean_hours=12, slowest=0.4, fastest=0.6)
    plain = generate_trace(FaultModel(), hosts=20, workers_per_host=4, duration_s=300 * DAY_S, seed=7)
    slowed = generate_trace(
        FaultModel(stragglers=stragglers), hosts=20, workers_per_host=4, duration_s=300 * DAY_S, seed=7
    )
    assert [e for e in slowed.events if e.kind != "slow"] == list(plain.events)
    speeds = {fault.speed for fault in slowed.faults()} - {0.0}
    assert speeds
    assert all(0.4 <= speed <= 0.6 for speed in speeds)
    expected = 5.0 / 1000 * 0.5
    shares = [
        trace_statistics(
            generate_trace(FaultModel(stragglers=stragglers), hosts=100, duration_s=100 * DAY_S, seed=seed)
        ).slow_share
        for seed in range(20)
    ]
    assert statistics.fmean(shares) == pytest.approx(expected, rel=0.15)


def test_at_every_rate_only_hosts_that_are_up_fail() -> None:
    model = FaultModel(faults_per_1000_host_days=2000.0)
    trace = generate_trace(model, hosts=5, duration_s=50 * DAY_S, seed=0)
    assert min(len(live_at(trace, time_s)) for time_s, _ in trace.groups()) == 0
    assert trace_statistics(trace).max_hosts_down == 5


def test_spot_hosts_come_and_go_as_measured() -> None:
    found = [trace_statistics(generate_trace(MODELS["spot"], hosts=24, duration_s=38_760, seed=s)) for s in range(60)]
    assert mean(found, "faults") == pytest.approx(74, rel=0.06)
    assert mean(found, "availability") == pytest.approx(0.525, rel=0.06)
    assert mean(found, "gap_variation") == pytest.approx(1.35, rel=0.08)
    assert mean(found, "short_gap_share") == pytest.approx(0.56, rel=0.08)


def test_spot_hosts_are_up_as_often_as_the_rates_balance() -> None:
    model = SpotModel(removals_per_host_hour=0.1, returns_per_place_hour=0.3)
    trace = generate_trace(model, hosts=50, workers_per_host=2, duration_s=3_000 * 3600, seed=1)
    assert trace_statistics(trace).availability == pytest.approx(0.3 / 0.4, abs=0.02)
    sizes = [sum(len(event.workers) for event in events) for _, events in trace.groups() if events[0].kind == "lost"]
    wanted = model.removal_sizes.mean * 2
    assert statistics.fmean(sizes) == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Weibull(shape=0.1),
        lambda: Weibull(shape=float("nan")),
        lambda: IncidentSizes(exponent=0.5),
        lambda: IncidentSizes(exponent=2, largest=0),
        lambda: Bursts(simultaneous_share=1.1),
        lambda: Repairs(median_days=0),
        lambda: Repairs(spread=-1),
        lambda: Repairs(longest_days=-1),
        lambda: Repairs(together_share=2),
        lambda: Stragglers(per_1000_worker_days=0),
        lambda: Stragglers(per_1000_worker_days=1, mean_hours=0),
        lambda: Stragglers(per_1000_worker_days=1, slowest=0.9, fastest=0.8),
        lambda: Stragglers(per_1000_worker_days=1, fastest=1.0),
        lambda: FaultModel(faults_per_1000_host_days=-1),
        lambda: FaultModel(single_share=-0.1),
        lambda: SpotModel(removals_per_host_hour=0),
        lambda: SpotModel(returns_per_place_hour=float("inf")),
        lambda: generate_trace(FaultModel(), hosts=0, duration_s=1, seed=0),
        lambda: generate_trace(FaultModel(), hosts=1, workers_per_host=0, duration_s=1, seed=0),
        lambda: generate_trace(SpotModel(), hosts=1, duration_s=0, seed=0),
    ],
)
def test_values_that_cannot_be(make: Any) -> None:
    with refused(ConfigError):
        make()
