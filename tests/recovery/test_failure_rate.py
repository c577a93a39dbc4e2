"""The expected time to the next failure against scipy's distributions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, gamma, lomax  # type: ignore[import-untyped]

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery import FailureRate

positive = st.floats(0.1, 1e6)
rates = st.builds(
    FailureRate,
    worker_mtbf_s=positive,
    prior_failures=st.floats(0.1, 20.0),
    failures=st.integers(0, 30),
    worker_s=st.floats(0.0, 1e8),
)


@given(rate=rates, workers=st.integers(1, 1000))
def test_it_is_the_mean_of_the_wait_if_the_rate_is_gamma_distributed(rate: FailureRate, workers: int) -> None:
    seen_s = rate.prior_failures * rate.worker_mtbf_s + rate.worker_s
    wait = lomax(c=1 + rate.prior_failures + rate.failures, scale=seen_s / workers)
    assert rate.horizon_s(workers) == pytest.approx(wait.mean(), rel=1e-9)


@pytest.mark.parametrize(("prior_failures", "failures"), [(0.5, 0), (1.0, 3), (4.0, 1)])
def test_that_distribution_is_a_mixture_of_waits_at_every_rate(prior_failures: float, failures: int) -> None:
    rate = FailureRate(worker_mtbf_s=50.0, prior_failures=prior_failures, failures=failures, worker_s=120.0)
    seen_s = prior_failures * 50.0 + 120.0
    per_worker = gamma(1 + prior_failures + failures, scale=1 / seen_s)
    mean_s = per_worker.expect(lambda per_s: 1 / (7 * per_s))
    assert rate.horizon_s(7) == pytest.approx(mean_s, rel=1e-6)


@given(rate=rates, workers=st.integers(1, 1000))
def test_it_is_also_one_over_a_mean_rate(rate: FailureRate, workers: int) -> None:
    seen_s = rate.prior_failures * rate.worker_mtbf_s + rate.worker_s
    per_worker = gamma(rate.prior_failures + rate.failures, scale=1 / seen_s)
    assert rate.horizon_s(workers) == pytest.approx(1 / (workers * per_worker.mean()), rel=1e-9)


def test_before_anything_is_seen_it_is_what_was_known() -> None:
    rate = FailureRate(worker_mtbf_s=3200.0, prior_failures=2.5)
    assert rate.horizon_s(32) == pytest.approx(100.0)


def test_what_is_seen_outweighs_it_in_time() -> None:
    known = FailureRate(worker_mtbf_s=1e9, prior_failures=1.0)
    seen = known.observed(failures=40_000, worker_s=3e6).observed(failures=20_000, worker_s=3e6)
    assert (seen.failures, seen.worker_s) == (60_000, 6e6)
    assert seen.horizon_s(10) == pytest.approx((1e9 + 6e6) / 60_001 / 10)
    assert known.horizon_s(10) == 1e8


@given(rate=rates, workers=st.integers(1, 100), worker_s=positive)
def test_a_failure_makes_it_shorter_and_quiet_time_longer(rate: FailureRate, workers: int, worker_s: float) -> None:
    assert rate.observed(failures=1).horizon_s(workers) < rate.horizon_s(workers)
    assert rate.observed(worker_s=worker_s).horizon_s(workers) >= rate.horizon_s(workers)
    assert rate.horizon_s(workers + 1) < rate.horizon_s(workers)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"worker_mtbf_s": 0.0}, "worker_mtbf_s must be a positive number"),
        ({"prior_failures": float("inf")}, "prior_failures must be a positive number"),
        ({"failures": -1}, "failures must be zero or more"),
        ({"failures": 1, "host_failures": 2}, "host_failures must be between 0 and the 1 failures"),
        ({"prior_host_share": 1.5}, "prior_host_share must be between 0 and 1"),
        ({"worker_s": -1.0}, "worker_s must be zero or a positive number"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, float], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        FailureRate(**({"worker_mtbf_s": 1.0, "prior_failures": 1.0} | changed))  # type: ignore[arg-type]


@given(
    share=st.sampled_from([0.0, 1e-3, 0.25, 0.7, 1.0]),
    weight=st.floats(0.1, 20.0),
    failures=st.integers(0, 50),
    data=st.data(),
)
def test_the_share_of_hosts_is_the_mean_of_a_beta_distribution(
    share: float, weight: float, failures: int, data: st.DataObject
) -> None:
    hosts = data.draw(st.integers(0, failures))
    rate = FailureRate(worker_mtbf_s=1.0, prior_failures=weight, prior_host_share=share)
    seen = rate.observed(failures=failures, host_failures=hosts)
    assert rate.host_share == pytest.approx(share)
    if 0 < share < 1:
        mean = beta(weight * share + hosts, weight * (1 - share) + failures - hosts).mean()
        assert seen.host_share == pytest.approx(mean)
    assert 0 <= seen.host_share <= 1 + 1e-12


def test_who_must_not_be_lost() -> None:
    rate = FailureRate(worker_mtbf_s=1.0, prior_failures=1.0, prior_host_share=0.2)
    link = Link(0.0, 1.0)
    hosts = Cluster(tuple(Worker(number, f"host {number // 2}") for number in range(8)), link, link)
    assert rate.fatal_share(last_holders=0, last_hosts=0, cluster=hosts) == 0
    assert rate.fatal_share(last_holders=3, last_hosts=2, cluster=hosts) == pytest.approx(0.8 * 3 / 8 + 0.2 * 2 / 4)
    one = Cluster(tuple(Worker(number, "host") for number in range(8)), link, link)
    assert rate.fatal_share(last_holders=2, last_hosts=1, cluster=one) == pytest.approx(2 / 8)


def test_nobody_cannot_fail() -> None:
    with pytest.raises(ConfigError, match="somebody must be live"):
        FailureRate(worker_mtbf_s=1.0, prior_failures=1.0).horizon_s(0)
