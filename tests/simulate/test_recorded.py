"""Runs that were recorded, read for the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan
from chameleon_ft.recovery.generation import CostsFrom
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.recorded import (
    Change,
    measured_parameters,
    recorded_changes,
    recorded_copies_s,
    recorded_run,
    trace_of_changes,
)
from tests.golden import refused
from tests.report.records import join_record
from tests.simulate.clusters import costs
from tests.simulate.live import live_at
from tests.simulate.runs import PLAN, config, decision, failure, finished, prepared, recorded, started

# One micro-batch takes 6 x 30 ms; two workers also reduce 6 x 200 MB, each half of them twice, over 50 GB/s.
STEP_S = 12 * 0.18 + 2 * (1e-5 + 6 * 10**8 / 50e9)

# --- changes ---------------------------------------------------------------------------------------------------------


CHANGES = st.lists(
    st.builds(Change, st.integers(-3, 33).map(float), st.integers(0, 3), st.booleans()),
    max_size=25,
    unique_by=lambda change: (change.time_s, change.worker),
)


@given(CHANGES)
def test_live_workers_follow_the_changes(changes: list[Change]) -> None:
    trace = trace_of_changes(changes, workers=4, duration_s=30.0)
    up = {0, 1, 2, 3}
    for second in range(31):
        for change in changes:
            if change.time_s == second:
                (up.discard if change.is_lost else up.add)(change.worker)
        assert live_at(trace, float(second)) == up


def test_losses_close_to_each_other_are_one_event() -> None:
    changes = [Change(5.0, 1, True), Change(5.2, 2, True), Change(5.4, 0, True), Change(9.0, 1, False)]
    trace = trace_of_changes(changes, workers=4, duration_s=20.0)
    assert [(time_s, sorted(w for e in events for w in e.workers)) for time_s, events in trace.groups()] == [
        (5.0, [1, 2]),
        (5.4, [0]),
        (9.0, [1]),
    ]


def test_losses_of_a_run_are_when_they_happened_not_when_they_were_recorded(tmp_path: Path) -> None:
    events = [
        started(1000.0),
        failure(1050.0, worker=1, stall_s=2.0),
        {"time": 1080.0, "event": "joined", "worker": 1, "host": "a"},
        finished(1100.0),
    ]
    changes, duration_s = recorded_changes(recorded(tmp_path / "run", events))
    assert changes == (Change(48.0, 1, True), Change(80.0, 1, False))
    assert duration_s == 100.0


# --- prior knowledge -------------------------------------------------------------------------------------------------


def test_prior_knowledge_is_in_the_configuration_and_the_first_plan(tmp_path: Path) -> None:
    of = config(policy="repair", worker_mtbf_hours=2.0, prior_weight=3.0, restart_cost_s=77.0)
    known = recorded_run(recorded(tmp_path / "run", [started()], of=of), Parameters(detect_s=9.0))
    assert (known.policy, known.start, known.costs) == ("repair", PLAN, costs(2))
    parameters = known.parameters
    assert (parameters.worker_mtbf_s, parameters.prior_failures, parameters.restart_cost_s) == (7200.0, 3.0, 77.0)
    assert parameters.detect_s == 9.0
    assert not parameters.has_checkpoints


def test_checkpoints_have_a_fixed_interval(tmp_path: Path) -> None:
    known = recorded_run(recorded(tmp_path / "run", [started()], of=config(every=5)))
    assert known.parameters.checkpoint_interval_s == pytest.approx(5 * STEP_S)


@pytest.mark.parametrize(("written", "steps"), [((1,), 100), ((1, 9, 5, 17, 27), 10)])
def test_checkpoints_of_a_run_that_chose_their_interval_come_as_often_as_there(
    tmp_path: Path, written: tuple[int, ...], steps: int
) -> None:
    events = [started(), *({"time": 1010.0, "event": "checkpoint", "step": step} for step in written)]
    known = recorded_run(recorded(tmp_path / "run", events, of=config(every="auto")))
    assert known.parameters.checkpoint_interval_s == pytest.approx(steps * STEP_S), "after 9, the run went back to 5"


def test_without_a_profile_measured_costs_are_used(tmp_path: Path) -> None:
    with refused(ConfigError):
        recorded_run(recorded(tmp_path / "none", [started()], plans={1: (PLAN, "assumed")}))
    plans: dict[int, tuple[Plan, CostsFrom]] = {1: (PLAN, "assumed"), 2: (PLAN, "measured")}
    assert recorded_run(recorded(tmp_path / "some", [started()], plans=plans)).costs == costs(2)


@pytest.mark.parametrize("events", [[], [started(), started(1100.0)]])
def test_runs_that_say_too_little_are_refused(tmp_path: Path, events: list[dict[str, object]]) -> None:
    run = recorded(tmp_path / "run", events)
    for read in (recorded_run, recorded_changes):
        with refused(ConfigError):
            read(run)


def test_a_run_without_plans_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError):
        recorded_run(recorded(tmp_path / "run", [started()], plans={}))


# --- measured parameters ---------------------------------------------------------------------------------------------


def test_phases_are_medians_of_single_losses(tmp_path: Path) -> None:
    events = [
        started(),
        prepared(1, losses=2, prepare_s=3.0),  # of one class: both workers are alike
        decision(2, prepared=True),
        failure(1010.0, generation=2, detect_s=0.1, stop_s=0.5, decide_s=0.01, regroup_s=0.2),
        decision(3, prepared=False),
        failure(1020.0, generation=3, detect_s=0.3, stop_s=0.7, decide_s=1.0, regroup_s=0.4),
        # Two at once: what they took overlaps, but for the search and what follows.
        decision(4, prepared=False, lost=(0, 1)),
        failure(1030.0, generation=4, worker=0, detect_s=8.0, stop_s=8.0, decide_s=5.0, regroup_s=0.6),
        failure(1030.0, generation=4, worker=1, detect_s=8.0, stop_s=8.0, decide_s=5.0, regroup_s=0.6),
        # The loss of a spare, and a return to a checkpoint, have no phases of a decision.
        failure(1040.0, generation=5, policy="none", regroup_s=9.0),
        failure(1050.0, generation=6, policy="checkpoint", regroup_s=9.0),
        finished(1060.0),
    ]
    found = measured_parameters([recorded(tmp_path / "run", events)])
    assert (found.detect_s, found.stop_s, found.decide_s) == pytest.approx((0.2, 0.6, 0.01))
    assert found.regroup_s == pytest.approx(0.4)
    assert found.search_s == pytest.approx(3.0)  # of 3 (prepared), 1 and 5
    assert found.weigh_s == pytest.approx(3.5)


def test_migrations_take_as_much_longer_as_in_the_run(tmp_path: Path) -> None:
    def switched(generation: int, *, migration_s: float, factor: float) -> dict[str, object]:
        scored = {"policy": "repartition", "step_s": 1.0, "stall_s": 0.0, "bytes": 8, "samples": 1.0, "feasible": True}
        made = decision(generation, prepared=True, lost=())
        return {
            **made,
            "trigger": "join",
            "corrections": {**made["corrections"], "migration": factor},
            "chosen": "repartition",
            "candidates": [{**scored, "reason": None, "migration_s": migration_s}],
        }

    def joined(generation: int, migrate_s: float, *, waves: int = 1) -> dict[str, object]:
        record = replace(join_record(3), generation=generation, migrate_s=migrate_s, waves=waves)
        return record.to_json()

    events = [
        started(),
        switched(2, migration_s=2.0, factor=1.0),
        joined(2, 5.0),
        switched(3, migration_s=5.0, factor=2.5),
        joined(3, 7.0),
        switched(4, migration_s=2.0, factor=2.0),
        joined(4, 8.0),
        # Of these, the time of the layers alone is not known.
        switched(5, migration_s=2.0, factor=1.0),
        joined(5, 90.0, waves=2),
        switched(6, migration_s=0.0, factor=1.0),
        joined(6, 90.0),
        finished(1060.0),
    ]
    assert measured_parameters([recorded(tmp_path / "run", events)]).migration_factor == pytest.approx(3.5)


def test_the_overhead_of_steps_is_their_time_beyond_the_estimate(tmp_path: Path) -> None:
    steps_s = {1: [50.0, STEP_S + 0.3, STEP_S + 0.1, STEP_S + 0.2]}  # the first one does not count
    runs = [recorded(tmp_path / "run", [started()], steps_s=steps_s), recorded(tmp_path / "none", [started()])]
    assert measured_parameters(runs).step_overhead_s == pytest.approx(0.2)


def test_the_time_of_a_checkpoint_is_the_recorded_one(tmp_path: Path) -> None:
    events = [
        started(),
        {"time": 1010.0, "event": "checkpoint", "step": 10},  # as runs of old versions wrote it
        *({"time": 1020.0, "event": "checkpoint", "step": 20, "copy_s": s, "write_s": 50.0} for s in (3.0, 0.25, 0.5)),
    ]
    run = recorded(tmp_path / "run", events)
    assert recorded_copies_s(run) == [3.0, 0.25, 0.5]
    assert measured_parameters([run]).checkpoint_write_s == 0.5
    assert recorded_copies_s(recorded(tmp_path / "old", events[:2])) == []


def test_figures_without_a_record_stay_as_they_were(tmp_path: Path) -> None:
    assumed = Parameters(detect_s=1.0, search_s=2.0, checkpoint_interval_s=math.inf)
    assert measured_parameters([], assumed) == assumed
    assert measured_parameters([recorded(tmp_path / "run", [started()])], assumed) == assumed
