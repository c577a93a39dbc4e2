"""The rule that ranks candidates, against what happens in drawn futures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.recovery import FailureModel, HolderSets, LossRisk, Prospect
from chameleon_ft.recovery.failure_model import Gap, Wait

MODEL = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0)


def prospect(gap: Gap, *, restart_s: float = 0.0, exposed: float = 0.0) -> Prospect:
    return Prospect(
        failures=MODEL, gap=gap, restart_s=restart_s, reference_step_s=1.5, exposed=exposed, has_checkpoints=True
    )


@pytest.mark.parametrize(("stall_s", "fatal"), [(0.0, 0.1), (5.0, 0.0), (40.0, 0.3)])
def test_steps_are_the_mean_over_drawn_futures(stall_s: float, fatal: float) -> None:
    gap = Gap(burst_share=0.3, burst_s=20.0, quiet=(Wait(1.0, 3.0, 1000.0),))
    ahead = prospect(gap, restart_s=100.0, exposed=0.5)
    generator = random.Random(1)
    total, draws = 0.0, 200_000
    for _ in range(draws):
        mean_s = 20.0 if generator.random() < 0.3 else 1000.0 / generator.gammavariate(3.0, 1.0)
        wait_s = generator.expovariate(1 / mean_s)
        total += max(0.0, wait_s - stall_s) / 2.0
        total -= 100.0 / 1.5 * (generator.random() < (0.5 if wait_s < stall_s else fatal))
    found = ahead.steps(step_s=2.0, stall_s=stall_s, fatal_share=ahead.fatal_share(stall_s, fatal))
    assert found == pytest.approx(total / draws, rel=0.02)


@given(horizon_s=st.floats(1.0, 1e6), stall_s=st.floats(0.0, 100.0))
def test_a_transition_may_pay_even_if_it_takes_longer_than_the_mean_gap(horizon_s: float, stall_s: float) -> None:
    ahead = prospect(Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 3.0, 2 * horizon_s),)))
    mean = max(0.0, horizon_s - stall_s)
    assert ahead.steps(step_s=1.0, stall_s=stall_s, fatal_share=0.0) >= mean - 1e-6


def test_without_checkpoints_all_that_was_trained_is_lost() -> None:
    seen = MODEL.observed(worker_s=4_000.0)
    for has_checkpoints, restart_s in ((True, 10.0), (False, 1_010.0)):
        ahead = Prospect.of(
            seen,
            workers=4,
            after_incident=False,
            held=None,
            restart_s=10.0,
            reference_step_s=1.0,
            has_checkpoints=has_checkpoints,
        )
        assert ahead.restart_s == restart_s
        assert ahead.exposed == 0


def test_workers_are_exposed_until_the_new_plan_is_reached() -> None:
    held = LossRisk(workers=HolderSets(4, {1: 4}), hosts=None)
    ahead = Prospect.of(
        MODEL, workers=4, after_incident=True, held=held, restart_s=1.0, reference_step_s=1.0, has_checkpoints=True
    )
    assert ahead.exposed == pytest.approx(MODEL.fatal_probability(held))
    shares = [ahead.fatal_share(stall_s, fatal=0.0) for stall_s in (0.0, 1.0, 100.0, 1e9)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(ahead.exposed)
