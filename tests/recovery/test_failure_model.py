"""The model of failures against scipy's distributions."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, expon, lomax, nbinom

from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery import Checkpoints, FailureModel, HolderSets, LossRisk, Prospect
from chameleon_ft.recovery.failure_model import _PRIORS, Gap, Wait
from tests.golden import refused

positive = st.floats(0.1, 1e6)
rates = st.builds(
    FailureModel,
    worker_mtbf_s=positive,
    prior_failures=st.floats(0.1, 20.0),
    failures=st.integers(0, 30),
    worker_s=st.just(0.0) | st.floats(1.0, 1e8),
)


@given(rate=rates, workers=st.integers(1, 1000), seconds=st.floats(0.0, 1e6))
def test_waits_are_mixed_by_how_probable_each_prior_makes_what_was_seen(
    rate: FailureModel, workers: int, seconds: float
) -> None:
    shape, failures = 1 + rate.prior_failures, rate.failures
    mean = math.fsum(weight * share for weight, share in _PRIORS)
    scales_s = [rate.prior_failures * rate.worker_mtbf_s * share / mean for _, share in _PRIORS]
    if rate.worker_s:
        logs = [nbinom(shape, scale_s / (scale_s + rate.worker_s)).logpmf(failures) for scale_s in scales_s]
    else:  # the limit for no time, without the factors that all have in common
        logs = [-failures * math.log(scale_s) for scale_s in scales_s]
    weights = [weight * math.exp(log - max(logs)) for (weight, _), log in zip(_PRIORS, logs, strict=True)]
    found = rate.waits(workers)
    assert [wait.weight for wait in found] == pytest.approx([each / sum(weights) for each in weights], abs=1e-6)
    for wait, scale_s in zip(found, scales_s, strict=True):
        expected = lomax(c=shape + failures, scale=(scale_s + rate.worker_s) / workers)
        assert wait.mean_s == pytest.approx(expected.mean())
        assert wait.within(seconds) == pytest.approx(expected.cdf(seconds))
        assert wait.left_after(seconds) == pytest.approx(expected.sf(seconds) * mean_excess_s(wait, seconds))
    assert rate.horizon_s(workers) == pytest.approx(math.fsum(wait.weight * wait.mean_s for wait in found))


def mean_excess_s(wait: Wait, seconds: float) -> float:
    """Return the remaining wait of a Lomax distribution, whose tail is Lomax again."""
    return float(lomax(c=wait.shape, scale=wait.scale_s + seconds).mean())


def test_a_prior_that_is_wrong_gives_way() -> None:
    # Thought to fail every 5,000 hours, a worker fails every two.
    known = rate = FailureModel(worker_mtbf_s=5_000 * 3600.0, prior_failures=1.0)
    for _ in range(6):
        rate = rate.observed(failures=1, worker_s=7200.0)
    assert 7200 / 2 < rate.horizon_s(1) < 3 * 7200
    # Thought to fail every two hours, it does not in 5,000.
    calm = FailureModel(worker_mtbf_s=7200.0, prior_failures=1.0).observed(worker_s=5_000 * 3600.0)
    assert calm.horizon_s(1) > 5_000 * 3600
    # The first failure comes after two minutes, or when it was to be expected.
    assert known.observed(failures=1, worker_s=24 * 120.0).horizon_s(24) < 3600
    assert known.observed(failures=1, worker_s=18e6).horizon_s(24) == pytest.approx(18e6 / 24, rel=0.4)


@pytest.mark.parametrize("faster", [1.0, 30.0, 1000.0])
def test_early_gaps_are_as_probable_as_by_the_right_rate_but_for_a_little(faster: float) -> None:
    """The log-likelihood of the first gaps, against that of a Poisson process with the rate that they are drawn by."""
    generator, mtbf_s = random.Random(0), 18e6
    behind = []
    for _ in range(200):
        model = FailureModel(worker_mtbf_s=mtbf_s, prior_failures=1.0)
        for _ in range(3):
            gap_s = generator.expovariate(10 * faster / mtbf_s)
            of_model = math.fsum(w.weight * lomax.pdf(gap_s, w.shape, scale=w.scale_s) for w in model.waits(10))
            behind.append(expon.logpdf(gap_s, scale=mtbf_s / 10 / faster) - math.log(of_model))
            model = model.observed(failures=1, worker_s=10 * gap_s)
    # A prior of the given rate alone is 4.8 nats behind where failures come 1,000 times as often.
    assert math.fsum(behind) / len(behind) < 1.0


@given(
    sizes=st.lists(st.integers(1, 80), max_size=30),
    workers=st.integers(1, 200),
)
def test_sizes_of_incidents_are_probabilities_that_fall(sizes: list[int], workers: int) -> None:
    model = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0)
    for size in sizes:
        model = model.observed(failures=size)
    assert model.incidents == len(sizes)
    assert model.failures == sum(sizes)
    shares = model.size_shares(workers)
    assert len(shares) == min(workers, 64)
    assert all(before > after > 0 for before, after in pairwise(shares))
    assert math.fsum(model.size_shares(64)) == pytest.approx(1)


@pytest.mark.parametrize("exponent", [2.7, 3.9])
def test_the_exponent_of_sizes_is_learned(exponent: float) -> None:
    weights = [size**-exponent for size in range(1, 65)]
    counts = {size: round(4_000 * weight / sum(weights)) for size, weight in enumerate(weights, start=1)}
    together = {size: count for size, count in counts.items() if size > 1 and count}
    failures = sum(size * count for size, count in counts.items())
    model = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0, failures=failures, together=together)
    shares = model.size_shares(64)
    for size in (1, 2, 4, 8):
        assert shares[size - 1] == pytest.approx(weights[size - 1] / sum(weights), rel=0.25)


waits = st.tuples(*[st.builds(Wait, st.just(0.5), st.floats(1.1, 30.0), st.floats(1.0, 1e6))] * 2)
gaps = st.builds(Gap, burst_share=st.floats(0, 0.99), burst_s=st.floats(0.1, 300.0), quiet=waits)


@given(gap=gaps, seconds=st.floats(0, 1e4))
def test_a_gap_is_a_mixture_of_bursts_and_waits(gap: Gap, seconds: float) -> None:
    parts = [(gap.burst_share, expon(scale=gap.burst_s), gap.burst_s)]
    for wait in gap.quiet:
        share = (1 - gap.burst_share) * wait.weight
        parts.append((share, lomax(c=wait.shape, scale=wait.scale_s), mean_excess_s(wait, seconds)))
    assert gap.within(seconds) == pytest.approx(sum(share * part.cdf(seconds) for share, part, _ in parts), abs=1e-9)
    left_s = sum(share * part.sf(seconds) * excess_s for share, part, excess_s in parts)
    assert gap.left_after(seconds) == pytest.approx(left_s, rel=1e-9)


@given(rate=rates, workers=st.integers(1, 100), data=st.data())
def test_the_mean_gap_is_the_horizon(rate: FailureModel, workers: int, data: st.DataObject) -> None:
    model = replace(rate, bursts=data.draw(st.integers(0, rate.failures)))
    for after_incident in (False, True):
        gap = model.gap(workers, after_incident=after_incident)
        assert gap.left_after(0.0) == pytest.approx(model.horizon_s(workers), rel=1e-9)
        assert 0 <= gap.burst_share < 1


def test_bursts_make_another_loss_during_a_recovery_more_probable() -> None:
    calm = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0, failures=40, worker_s=4e7)
    bursts = replace(calm, bursts=20)
    within = [each.gap(10, after_incident=True).within(60.0) for each in (calm, bursts)]
    assert within[0] < 0.02
    assert within[1] > 0.15
    assert bursts.gap(10, after_incident=False).within(60.0) < 0.01


def test_before_anything_is_seen_it_is_what_was_known() -> None:
    rate = FailureModel(worker_mtbf_s=3200.0, prior_failures=2.5)
    assert rate.horizon_s(32) == pytest.approx(100.0)


def test_what_is_seen_outweighs_it_in_time() -> None:
    known = FailureModel(worker_mtbf_s=1e9, prior_failures=1.0)
    seen = replace(known, failures=59_999).observed(worker_s=3e6).observed(failures=1, worker_s=3e6)
    assert (seen.failures, seen.worker_s) == (60_000, 6e6)
    # So many failures would not have come in that time if what was known were right.
    assert seen.horizon_s(10) == pytest.approx(6e6 / 60_001 / 10, rel=0.1)
    assert known.horizon_s(10) == pytest.approx(1e8)


@given(rate=rates, workers=st.integers(1, 100), worker_s=positive)
def test_a_failure_makes_it_shorter_and_quiet_time_longer(rate: FailureModel, workers: int, worker_s: float) -> None:
    assert rate.observed(failures=1).horizon_s(workers) < rate.horizon_s(workers)
    assert rate.observed(worker_s=worker_s).horizon_s(workers) >= rate.horizon_s(workers)
    assert rate.horizon_s(workers + 1) < rate.horizon_s(workers)


@pytest.mark.parametrize(
    "changed",
    [
        {"worker_mtbf_s": 0.0},
        {"prior_failures": float("inf")},
        {"prior_failures": 1e-300},
        {"worker_mtbf_s": 1e300},
        {"failures": -1},
        {"failures": 1, "host_failures": 2},
        {"prior_host_failure_fraction": 1.5},
        {"failures": 3, "together": {1: 2}},
        {"failures": 3, "together": {2: 2}},
        {"failures": 3, "together": {2: 1}, "bursts": 3},
        {"worker_s": -1.0},
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    with refused(ConfigError):
        FailureModel(**({"worker_mtbf_s": 1.0, "prior_failures": 1.0} | changed))


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
    rate = FailureModel(worker_mtbf_s=1.0, prior_failures=weight, prior_host_failure_fraction=share)
    seen = rate.observed(failures=failures, host_failures=hosts)
    assert rate.host_failure_fraction == pytest.approx(share)
    if 0 < share < 1:
        mean = beta(weight * share + hosts, weight * (1 - share) + failures - hosts).mean()
        assert seen.host_failure_fraction == pytest.approx(mean)
    assert 0 <= seen.host_failure_fraction <= 1 + 1e-12


def test_the_only_holders_must_not_be_lost() -> None:
    rate = FailureModel(worker_mtbf_s=1.0, prior_failures=1.0, prior_host_failure_fraction=0.2)
    none = LossRisk(workers=HolderSets(8, {}), hosts=HolderSets(4, {}))
    assert rate.fatal_probability(none) == 0
    some = LossRisk(workers=HolderSets(8, {1: 3}), hosts=HolderSets(4, {1: 2}))
    of_workers = rate.fatal_probability(LossRisk(workers=some.workers, hosts=None))
    first = rate.size_shares(1)[0]
    assert first * 3 / 8 < of_workers < 3 / 8 + 1 - first
    certain = replace(rate, failures=1_000_000)
    assert certain.fatal_probability(some) == pytest.approx(3 / 8, rel=0.03), "hosts hardly ever fail by now"
    assert replace(certain, host_failures=1_000_000).fatal_probability(some) == pytest.approx(2 / 4, rel=0.03)
    assert replace(certain, host_failures=1_000_000).fatal_probability(
        LossRisk(workers=some.workers, hosts=None)
    ) == pytest.approx(3 / 8, rel=0.03), "the only host is left out"


def test_it_can_be_written_down() -> None:
    model = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0).observed(failures=3, host_failures=1, worker_s=5.0)
    model = model.observed(failures=1, gap_s=10.0)
    assert FailureModel.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_without_workers_nothing_can_fail() -> None:
    with refused(ConfigError):
        FailureModel(worker_mtbf_s=1.0, prior_failures=1.0).horizon_s(0)


def test_what_no_plan_survives_takes_all_workers_or_all_hosts() -> None:
    model = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0, prior_host_failure_fraction=0.25)
    workers = HolderSets(8, {4: 2})
    alone = model.total_loss_probability(LossRisk(workers=workers, hosts=None))
    two, four = (
        model.total_loss_probability(LossRisk(workers=workers, hosts=HolderSets(hosts, {2: 1}))) for hosts in (2, 4)
    )
    assert 0.25 < alone < 0.26, "every failure of the only host takes all"
    assert 0 < four < two < alone
    more = 0.75 * (1 - math.fsum(model.size_shares(7))) + 0.25 * (1 - math.fsum(model.size_shares(1)))
    assert two == pytest.approx(more)


def test_checkpoints_are_more_frequent_if_a_host_is_the_only_one() -> None:
    gap = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0).gap(8, after_incident=False)
    ahead = Prospect(
        failures=FailureModel(worker_mtbf_s=1e6, prior_failures=1.0),
        gap=gap,
        restart_cost_s=300.0,
        checkpoints=Checkpoints(longest_s=3_600.0, write_s=1.0),
        reference_step_s=1.0,
        exposed=0.0,
        has_checkpoints=True,
    )
    safe, alone = (
        ahead.of_plan(step_s=1.0, stall_s=0.0, fatal=0.0, from_checkpoint=False, total_loss=total_loss)
        for total_loss in (0.0, 0.25)
    )
    assert safe.return_s == 0 < alone.return_s < 0.25 * 3_600.0 / 2
    assert alone.steps < safe.steps
