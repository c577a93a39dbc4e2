"""The schedules of failures that policies are compared under."""

from __future__ import annotations

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from benchmarks._policies_scenarios import PP, SCENARIOS, Scenario, pipelines, schedule

ANY_SCENARIO = st.sampled_from(sorted(SCENARIOS))
WORKERS = st.sampled_from([8, 16, 32])

# --- schedules -------------------------------------------------------------------------------------------------------


@drawn(ANY_SCENARIO, WORKERS, st.integers(0, 1000))
def test_a_schedule_keeps_to_its_scenario(name: str, workers: int, seed: int) -> None:
    scenario = SCENARIOS[name]
    losses = schedule(scenario, workers=workers, duration_s=100.0, seed=seed)
    assert losses == schedule(scenario, workers=workers, duration_s=100.0, seed=seed)
    assert len(losses) <= scenario.events
    assert [loss.at_s for loss in losses] == sorted(loss.at_s for loss in losses)
    assert all(0 <= loss.at_s <= 80 for loss in losses)
    assert all(1 <= len(set(loss.workers)) <= scenario.burst for loss in losses)
    assert all(len({worker // 8 for worker in loss.workers}) == 1 for loss in losses), "of one host"


@drawn(ANY_SCENARIO, WORKERS, st.integers(0, 1000))
def test_no_worker_is_lost_twice_without_having_been_back_and_half_are_always_left(
    name: str, workers: int, seed: int
) -> None:
    scenario = SCENARIOS[name]
    gone: dict[int, float] = {}
    for loss in schedule(scenario, workers=workers, duration_s=100.0, seed=seed):
        for worker in loss.workers:
            assert scenario.returns or worker not in gone
            assert loss.at_s >= gone.get(worker, 0.0) + scenario.back_after_s(100.0) or worker not in gone
            gone[worker] = loss.at_s
        if not scenario.returns:
            assert len(gone) <= workers // 2


def test_with_and_without_returning_workers_losses_come_at_the_same_times() -> None:
    for name in ("medium", "frequent", "rare-bursts"):
        once, back = (
            [loss.at_s for loss in schedule(SCENARIOS[each], workers=32, duration_s=100.0, seed=3)]
            for each in (name, f"{name}-returning")
        )
        assert once == back


@pytest.mark.parametrize("stage", range(PP))
def test_one_loss_is_of_its_stage(stage: int) -> None:
    (loss,) = schedule(SCENARIOS[f"one-loss-{stage}"], workers=32, duration_s=100.0, seed=0)
    assert (loss.at_s, [worker % PP for worker in loss.workers]) == (10.0, [stage])


@pytest.mark.parametrize("workers", [8, 32])
def test_half_a_host_is_of_one_stage_as_long_as_there_are_enough(workers: int) -> None:
    scenario = SCENARIOS["half-host"]
    (loss,) = schedule(scenario, workers=workers, duration_s=100.0, seed=0)
    order = pipelines(scenario, workers)
    assert len({order.index(worker) % PP for worker in loss.workers}) == (1 if workers == 32 else 2)


def test_hosts_hold_pipelines_or_stages() -> None:
    assert pipelines(Scenario(name="", about=""), 32) == list(range(32))
    order = pipelines(Scenario(name="", about="", hosts_hold="stages"), 32)
    assert sorted(order) == list(range(32))
    assert [order[stage::PP] for stage in range(PP)] == [list(range(8 * stage, 8 * stage + 8)) for stage in range(PP)]


def test_the_truth_counts_workers_that_are_lost_together_once() -> None:
    assert SCENARIOS["medium-bursts"].worker_mtbf_s(workers=30, duration_s=100.0) == 100 * 30 / 2
    assert SCENARIOS["one-loss-1"].worker_mtbf_s(workers=30, duration_s=100.0) is None
