"""Results, report and settings of a comparison of policies."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from benchmarks import policies
from benchmarks._common import ROOT
from benchmarks._policies_observed import Change, Commit, Observed, Outage, Outcome, mean_size
from benchmarks._policies_report import Found, bars
from benchmarks._policies_scenarios import SCENARIOS
from chameleon_ft.plan import Plan


def observed(**changes: Any) -> Observed:
    """Steps of 2 s with 8 samples; a loss at 5 s, training goes on at 6 s with steps of 4 s."""
    run = Observed(
        run="here",
        duration_s=20.0,
        workers=4,
        commits=(
            Commit(-2.0, 0, 1, 8, 3.0),
            Commit(0.0, 1, 1, 8, 1.99),
            Commit(2.0, 2, 1, 8, 1.99),
            Commit(4.0, 3, 1, 8, 1.99),
            Commit(10.0, 4, 2, 8, 4.0),
            Commit(14.0, 5, 2, 8, 4.0),
            Commit(18.0, 6, 2, 8, 4.0),
            Commit(22.0, 7, 2, 8, 4.0),
        ),
        changes=(Change(5.0, 1, -1),),
        skipped=(),
        outages=(Outage(6.0, 2, "repair", 1.0, 10**9, 0.0),),
        outcomes=(Outcome(2, 3, 4.2, 4.0, 0.9, 1.0),),
        ended=None,
        others_share=0.01,
    )
    return replace(run, **changes)


def test_throughput_counts_what_was_committed_and_of_the_last_step_what_is_inside() -> None:
    # Steps 2 and 3, 4 to 6, and half of 7.
    assert observed().samples_per_s == pytest.approx(8 * 5.5 / 20)
    assert [stretch.begin_s for stretch in observed().stretches] == pytest.approx([-5, -2, 0, 2, 6, 10, 14, 18])


@drawn(st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 3)), min_size=1, max_size=8), st.floats(0.1, 60))
def test_stretches_do_not_overlap_and_hold_all_samples(steps: list[tuple[float, float]], duration_s: float) -> None:
    commits, at_s = [], 0.0
    for number, (step_s, gap_s) in enumerate(steps):
        at_s += gap_s + step_s
        commits.append(Commit(at_s, number, number // 2, 8, step_s))
    run = observed(commits=tuple(commits), duration_s=duration_s)
    stretches = run.stretches
    assert all(after.begin_s >= before.end_s - 1e-9 for before, after in itertools.pairwise(stretches))
    assert sum(stretch.within(at_s) for stretch in stretches) == pytest.approx(8 * len(steps))
    assert run.samples_per_s * duration_s <= 8 * len(steps) * (1 + 1e-9)


def test_errors_are_those_of_the_decisions() -> None:
    run = observed(
        outcomes=(*observed().outcomes, Outcome(3, 2, 0.99, 1.0, 0.9, 1.0), Outcome(4, 1, 9.0, 1.0, 9.0, 1.0))
    )
    assert run.steps_s() == {1: [2.0, 2.0, 2.0], 2: [4.0, 4.0, 4.0]}
    assert run.step_errors == pytest.approx([0.05, -0.01]), "where only the first step was made, it is like no other"
    assert run.stall_errors == pytest.approx([-0.1])
    assert mean_size(run.step_errors) == pytest.approx(0.03)
    restart = observed(outages=(Outage(6.0, 2, "restart", 1.0, 0, 0.8),))
    assert restart.stall_errors == pytest.approx([-0.5])
    assert observed(outages=()).stall_errors == [], "no worker was lost: the change is for a worker that joined"
    assert (run.last_step_s, observed(commits=run.commits[:4]).last_step_s) == (4.0, None)


# --- the report ------------------------------------------------------------------------------------------------------


def test_after_one_loss_throughput_is_that_of_the_last_generation() -> None:
    found = Found(SCENARIOS["one-loss-0"], {"chameleon": observed()})
    assert found.kept("chameleon") == 0.5
    values = {bar.name.partition(",")[0]: bar.value for bar in bars([found])}
    assert values["after one loss by failure-free"] == 0.5
    assert values["after one loss by surviving capacity"] == pytest.approx(0.5 * 4 / 3)
    assert values["mean |error| of the step time"] == pytest.approx(0.05)
    assert values["mean |error| of the stall"] == pytest.approx(0.1)


def settings(**changes: Any) -> argparse.Namespace:
    given = {
        "workers": 8,
        "share": 2,
        "optimizer_redundancy": "all",
        "duration_s": 40.0,
        "time_scale": 2.0,
        "restart_s": 300.0,
        "seed": 0,
        "profile": ROOT / "profiles" / "llama2-7b-h100-80g.json",
        "report_only": False,
    }
    return argparse.Namespace(**given | changes)


@pytest.mark.parametrize("name", ["medium", "rare-bursts", "one-loss-2"])
def test_a_run_knows_the_truth_of_its_scenario(name: str, tmp_path: Path) -> None:
    files = {"profile": tmp_path / "profile.json", "plan": tmp_path / "plan.json"}
    config = policies.configured(SCENARIOS[name], "restart", given=settings(), **files)
    truth_s = SCENARIOS[name].worker_mtbf_s(workers=8, duration_s=40.0)
    assert config.recovery.worker_mtbf_hours * 3600 == pytest.approx(truth_s or 5000 * 3600)
    assert (config.recovery.policy, config.recovery.restart_cost_s, config.recovery.host_failure_fraction) == (
        "restart",
        600,
        0,
    )
    assert config.checkpoint.every not in (0, "auto")
    assert type(config).model_validate(config.model_dump()) == config
    plan = Plan.from_json(files["plan"].read_text(encoding="utf-8"))
    assert (plan.micro_batches, plan.split_backward, len(plan.workers)) == (4, True, 8)
