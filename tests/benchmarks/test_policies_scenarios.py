"""The schedules of failures that policies are compared under."""

from __future__ import annotations

from hypothesis import given as drawn
from hypothesis import strategies as st

from benchmarks._policies_scenarios import SCENARIOS, schedule

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
