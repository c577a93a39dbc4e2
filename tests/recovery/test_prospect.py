"""The rule that ranks candidates, against what happens in drawn futures."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.recovery import Checkpoints, FailureModel, HolderSets, LossRisk, Prospect
from chameleon_ft.recovery.failure_model import Gap, Wait

MODEL = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0)


def prospect(
    gap: Gap, *, restart_cost_s: float = 0.0, exposed: float = 0.0, checkpoints: Checkpoints | None = None
) -> Prospect:
    return Prospect(
        failures=MODEL,
        gap=gap,
        restart_cost_s=restart_cost_s,
        checkpoints=checkpoints or Checkpoints(),
        reference_step_s=1.5,
        exposed=exposed,
        has_checkpoints=True,
    )


@pytest.mark.parametrize("from_checkpoint", [False, True])
@pytest.mark.parametrize(("stall_s", "fatal"), [(0.0, 0.1), (5.0, 0.02), (40.0, 0.3)])
def test_a_plan_comes_to_the_mean_over_drawn_futures(stall_s: float, fatal: float, from_checkpoint: bool) -> None:
    gap = Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 1e6, 1e9),))
    ahead = prospect(gap, restart_cost_s=100.0, exposed=0.5, checkpoints=Checkpoints(unsaved_s=60.0, longest_s=80.0))
    generator = random.Random(1)
    steps = returns = return_s = 0.0
    draws = 200_000
    unsaved_s, exposed = (0.0, 1.0) if from_checkpoint else (60.0, 0.5)
    for _ in range(draws):
        wait_s = generator.expovariate(1 / 1000.0)
        steps += max(0.0, wait_s - stall_s) / 2.0
        is_fatal = generator.random() < (exposed if wait_s < stall_s else fatal)
        if is_fatal:
            returns += 1
            return_s += 100.0 + (unsaved_s if wait_s < stall_s else (unsaved_s + wait_s) % 80.0)
    found = ahead.of_plan(step_s=2.0, stall_s=stall_s, fatal=fatal, from_checkpoint=from_checkpoint)
    assert found.fatal_share == pytest.approx(returns / draws, rel=0.02)
    assert found.return_s == pytest.approx(return_s / draws, rel=0.02)
    assert found.steps == pytest.approx((steps - return_s / 1.5) / draws, rel=0.02)


@pytest.mark.parametrize("stall_s", [0.0, 100.0, 2000.0])
def test_the_next_loss_costs_what_its_peers_do_if_the_step_is_completed(stall_s: float) -> None:
    # The wait is exponential with a mean of 1,000 s.
    gap = Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 1e6, 1e9),))
    repeats, salvages = prospect(gap), replace(prospect(gap), salvages=True)
    found = {
        share: [
            ahead.of_plan(step_s=3.0, stall_s=stall_s, fatal=0.0, from_checkpoint=False, share_per_peer=share).steps
            for ahead in (repeats, salvages)
        ]
        for share in (0.0, 0.5)
    }
    assert found[0.0][0] == found[0.0][1] == found[0.5][0]
    lost_s = found[0.0][1] - found[0.5][1]
    assert lost_s == pytest.approx(math.exp(-stall_s / 1000.0) * 0.5 * 3.0 / 1.5, rel=1e-3)


@pytest.mark.parametrize(("stall_s", "migration_s"), [(0.0, 0.0), (0.0, 50.0), (5.0, 400.0), (40.0, 3000.0)])
def test_training_continues_at_another_rate_during_a_migration(stall_s: float, migration_s: float) -> None:
    # The wait is exponential with a mean of 1,000 s: of a stretch of time, the integral of exp(-t / 1000) is trained.
    ahead = prospect(Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 1e6, 1e9),)), restart_cost_s=100.0, exposed=0.5)
    found = ahead.of_plan(
        step_s=2.0,
        stall_s=stall_s,
        fatal=0.1,
        from_checkpoint=False,
        migration_s=migration_s,
        migration_step_s=3.0,
    )
    left, reached = (math.exp(-each / 1000.0) for each in (stall_s, stall_s + migration_s))
    fatal_share = (1 - reached) * 0.5 + reached * 0.1
    assert found.fatal_share == pytest.approx(fatal_share, rel=1e-3)
    assert found.steps == pytest.approx(
        1000.0 * ((left - reached) / 3.0 + reached / 2.0) - found.return_s / 1.5, rel=1e-3
    )


@given(horizon_s=st.floats(1.0, 1e6), stall_s=st.floats(0.0, 100.0))
def test_a_transition_may_pay_even_if_it_takes_longer_than_the_mean_gap(horizon_s: float, stall_s: float) -> None:
    ahead = prospect(Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 3.0, 2 * horizon_s),)))
    mean = max(0.0, horizon_s - stall_s)
    assert ahead.of_plan(step_s=1.0, stall_s=stall_s, fatal=0.0, from_checkpoint=False).steps >= mean - 1e-6


def test_a_plan_that_risks_more_writes_more_checkpoints_and_pays_for_them() -> None:
    gap = Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 3.0, 20_000.0),))
    ahead = prospect(gap, checkpoints=Checkpoints(longest_s=3_600.0, write_s=10.0))
    safe, risky, riskier = (
        ahead.of_plan(step_s=1.0, stall_s=0.0, fatal=fatal, from_checkpoint=False) for fatal in (0.0, 0.05, 0.5)
    )
    assert safe.steps == pytest.approx(10_000.0 / (1 + 10.0 / 3_600.0))
    assert risky.return_s / 0.05 > riskier.return_s / 0.5
    assert risky.steps + risky.return_s / 1.5 > riskier.steps + riskier.return_s / 1.5


def test_steps_that_are_not_saved_make_a_return_dearer_for_plans_that_keep_them() -> None:
    gap = Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 3.0, 2_000.0),))
    saved, unsaved = (
        prospect(gap, restart_cost_s=300.0, checkpoints=Checkpoints(unsaved_s=unsaved_s, longest_s=7_200.0))
        for unsaved_s in (0.0, 3_600.0)
    )
    for from_checkpoint in (False, True):
        before, after = (
            ahead.of_plan(step_s=1.0, stall_s=1.0, fatal=0.5, from_checkpoint=from_checkpoint)
            for ahead in (saved, unsaved)
        )
        assert (after.steps < before.steps) != from_checkpoint


def of_workers(*, held: LossRisk | None = None, has_checkpoints: bool = True) -> Prospect:
    return Prospect.of(
        MODEL.observed(worker_s=4_000.0),
        workers=4,
        after_incident=held is not None,
        held=held,
        restart_cost_s=10.0,
        checkpoints=Checkpoints(unsaved_s=60.0),
        reference_step_s=1.0,
        has_checkpoints=has_checkpoints,
    )


def test_without_checkpoints_all_that_was_trained_is_lost() -> None:
    for has_checkpoints, restart_cost_s, unsaved_s in ((True, 10.0, 60.0), (False, 1_010.0, 0.0)):
        ahead = of_workers(has_checkpoints=has_checkpoints)
        assert ahead.restart_cost_s == restart_cost_s
        assert ahead.checkpoints.unsaved_s == unsaved_s
        assert ahead.exposed == 0


def test_workers_are_exposed_until_the_new_plan_is_reached() -> None:
    held = LossRisk(workers=HolderSets(4, {1: 4}), hosts=None)
    ahead = of_workers(held=held)
    assert ahead.exposed == pytest.approx(ahead.failures.fatal_probability(held))
    shares = [
        ahead.of_plan(step_s=1.0, stall_s=stall_s, fatal=0.0, from_checkpoint=False).fatal_share
        for stall_s in (0.0, 1.0, 100.0, 1e9)
    ]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(ahead.exposed, rel=1e-3)
