"""Decisions that count on snapshots: a return to one costs less than a restart, and takes the place of a checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chameleon_ft.cost.snapshots import SnapshotRule
from chameleon_ft.errors import ConfigError
from chameleon_ft.recovery import Candidate, Checkpoints, FailureModel, Prospect, Snapshots, decide
from chameleon_ft.recovery.failure_model import Gap, Wait
from tests.golden import refused
from tests.recovery.contexts import after, context, layer, rate_of

MODEL = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0)
SNAPSHOTS = Snapshots(taken=Checkpoints(unsaved_s=3.0, longest_s=8.0), return_s=0.5)
AHEAD = Prospect(
    failures=MODEL,
    gap=Gap(burst_share=0.0, burst_s=1.0, quiet=(Wait(1.0, 1e6, 1e9),)),
    restart_cost_s=100.0,
    checkpoints=Checkpoints(unsaved_s=60.0, longest_s=80.0),
    reference_step_s=1.5,
    exposed=0.5,
    has_checkpoints=True,
    snapshots=SNAPSHOTS,
)


@pytest.mark.parametrize(("stall_s", "fatal", "total_loss"), [(0.0, 0.1, 0.0), (5.0, 0.02, 0.05), (40.0, 0.3, 0.1)])
def test_a_plan_comes_to_the_mean_over_drawn_futures(stall_s: float, fatal: float, total_loss: float) -> None:
    ahead = AHEAD
    generator = random.Random(1)
    steps = return_s = 0.0
    draws = 200_000
    for _ in range(draws):
        wait_s = generator.expovariate(1 / 1000.0)
        steps += max(0.0, wait_s - stall_s) / 2.0
        is_early, kind = wait_s < stall_s, generator.random()
        share = 0.5 if is_early else fatal
        if kind < share:
            return_s += 0.5 + (3.0 if is_early else (3.0 + wait_s) % 8.0)
        elif kind < share + total_loss:
            return_s += 60.0 if is_early else (60.0 + wait_s) % 80.0
    found = ahead.of_plan(step_s=2.0, stall_s=stall_s, fatal=fatal, total_loss=total_loss, from_checkpoint=False)
    assert found.return_s == pytest.approx(return_s / draws, rel=0.02)
    assert found.steps == pytest.approx((steps - return_s / 1.5) / draws, rel=0.02)


def test_a_faster_plan_with_single_holders_is_chosen_only_with_snapshots() -> None:
    """Two hosts of two workers each; one worker of the second is lost."""
    before = replace(context(dp=2, pp=2, hosts=2, layers=(layer(10),) * 12), has_checkpoints=False)
    now = after(before, 3)
    rate = rate_of(50_000.0, now, host_failure_fraction=0.9)
    without = decide(now, "chameleon", rate).chosen
    with_snapshots = decide(replace(now, snapshots=SNAPSHOTS), "chameleon", rate).chosen
    assert without is not None
    assert without.host_single_points_of_failure == 0
    assert with_snapshots is not None
    assert with_snapshots.host_single_points_of_failure > 0
    assert with_snapshots.step_s is not None
    assert without.step_s is not None
    assert with_snapshots.step_s < without.step_s


def test_a_decision_counts_on_snapshots_only_under_plans_for_which_hosts_have_the_memory() -> None:
    """Of plans on one host each, those with single holders need snapshots, for which the hosts are too small."""
    before = replace(context(dp=2, pp=2, hosts=2, layers=(layer(10),) * 12), has_checkpoints=False)
    now = after(before, 3)
    rate, hosts = rate_of(50_000.0, now, host_failure_fraction=0.9), set(now.costs.cluster.hosts.values())

    def chosen(host_bytes: int, *, at_any_size: bool = False) -> Candidate:
        rule = SnapshotRule(host_memory=dict.fromkeys(hosts, host_bytes), at_any_size=at_any_size)
        decision = decide(replace(now, snapshots=replace(SNAPSHOTS, rule=rule)), "chameleon", rate)
        assert decision.chosen is not None
        return decision.chosen

    without = decide(now, "chameleon", rate).chosen
    with_room, lacking = chosen(10**15), chosen(1)
    assert with_room.has_snapshots
    assert with_room.host_single_points_of_failure > 0
    assert not lacking.has_snapshots
    assert without is not None
    assert (lacking.policy, lacking.host_single_points_of_failure) == (without.policy, 0)
    assert chosen(1, at_any_size=True) == with_room


@pytest.mark.parametrize("fatal", [0.0, 0.1, 0.3])
def test_a_plan_without_snapshots_returns_to_a_checkpoint(fatal: float) -> None:
    ahead = replace(AHEAD, exposed=0.0)
    plain = replace(ahead, snapshots=None)
    found = ahead.of_plan(step_s=2.0, stall_s=5.0, fatal=fatal, from_checkpoint=False, has_snapshots=False)
    assert found == plain.of_plan(step_s=2.0, stall_s=5.0, fatal=fatal, from_checkpoint=False)


def test_a_layer_without_holder_is_restored_from_a_snapshot_in_the_fastest_plan() -> None:
    now = replace(after(context(dp=2, pp=2), 1, 3), has_checkpoints=False, snapshots=SNAPSHOTS)
    decision = decide(now, "chameleon", rate_of(1e5, now))
    assert decision.chosen is not None
    assert (decision.chosen.policy, decision.chosen.from_checkpoint) == ("snapshot", True)
    assert decision.chosen.stall_s == 3.5
    without = decide(replace(now, snapshots=None), "chameleon", rate_of(1e5, now))
    assert without.chosen is None


def test_the_way_back_takes_no_negative_time() -> None:
    with refused(ConfigError):
        Snapshots(taken=Checkpoints(), return_s=-1.0)
