"""Reports about a live run, as its files grow."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chameleon_ft.errors import ConfigError
from chameleon_ft.events.kinds import CheckpointComplete, Drained, Finished
from chameleon_ft.events.records import Started, StepRecord
from chameleon_ft.report.facts import describe_workers, facts_of
from chameleon_ft.report.follower import RunFollower, RunWatcher
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.golden import refused
from tests.report.live.lines import BEGAN, SLOW, add, event, failed, lost, new_run, started, stepped


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose coordinator is this process."""
    run = new_run(tmp_path)
    run.write_control(ControlAddress(address="127.0.0.1:1", token="t", pid=os.getpid()))
    return run


class Clock:
    """A clock that stands; in seconds since the run began."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return BEGAN + self.at


def watched(run: RunDirectory, at: float) -> RunWatcher:
    clock = Clock()
    clock.at = at
    watcher = RunWatcher(run, clock=clock)
    watcher.update()
    return watcher


# --- the lines -------------------------------------------------------------------------------------------------------


def test_lines_are_read_once_in_the_order_of_their_times_and_only_when_complete(run: RunDirectory) -> None:
    follower = RunFollower(run)
    assert follower.new_records() == []
    add(run, stepped(0, 2.0), started(1.0), stepped(1, 4.0), event("checkpoint", 3.0, step=1))
    assert [type(record) for record in follower.new_records()] == [Started, StepRecord, CheckpointComplete, StepRecord]
    written = json.dumps(stepped(2, 5.0))
    with run.metrics_file.open("a") as file:
        file.write(written[:20])
    assert follower.new_records() == []
    with run.metrics_file.open("a") as file:
        file.write(written[20:] + "\n")
    assert [record.to_json() for record in follower.new_records()] == [stepped(2, 5.0)]


@pytest.mark.parametrize("set_at", [20, 40])
def test_lines_keep_the_order_in_which_they_were_written_when_a_clock_is_set_back(
    run: RunDirectory, set_at: int
) -> None:
    """Which the follower may read all at once, or while they are written."""
    begun = RunWatcher(run)
    for step in range(60):
        setback = 3600.0 if step >= set_at else 0.0
        add(run, *([] if step else [started(0.5)]), stepped(step, 1.0 + step - setback))
        if step in (3, 30, 50):
            add(run, event("checkpoint", 1.2 + step - setback, step=step + 1))
        begun.update()
    add(run, event("finished", 61.0 - 3600.0, status="finished", reason="all steps are trained"))
    begun.update()
    for watcher in (begun, RunWatcher(run)):
        watcher.update()
        report = watcher.report()
        assert report.condition == "finished"
        assert report.last is not None
        assert report.last.step == 59
        assert report.goodput is not None
        assert report.goodput > 0.4
        assert isinstance(watcher.view.events[-1], Finished)
        assert report.checkpoint is not None
        assert report.checkpoint.step == 51


def test_an_age_is_counted_from_when_a_file_was_written_not_by_its_clock(run: RunDirectory) -> None:
    add(run, started(0.5), stepped(0, 1.0))  # years before this machine's time
    watcher = RunWatcher(run)
    watcher.update()
    age_s = watcher.report().last_step_age_s
    assert age_s is not None
    assert age_s < 1800


def test_a_damaged_line_is_named_once(run: RunDirectory) -> None:
    add(run, started())
    run.events_file.write_text(run.events_file.read_text() + "{\n")
    follower = RunFollower(run)
    with refused(ConfigError):
        follower.new_records()
    add(run, event("drained", 9.0, worker=1))
    assert [type(record) for record in follower.new_records()] == [Started, Drained]


def test_what_follows_a_damaged_line_is_not_read_again(run: RunDirectory) -> None:
    run.events_file.write_text("{\n")
    add(run, started())
    follower = RunFollower(run)
    with refused(ConfigError):
        follower.new_records()
    run.events_file.unlink()
    assert [type(record) for record in follower.new_records()] == [Started]


def test_steps_of_a_version_that_noted_no_times_are_left_out(run: RunDirectory) -> None:
    for step in range(3):
        line = stepped(step, 1.0)
        del line["time"]
        add(run, line)
    add(run, stepped(3, 2.0))
    watcher = RunWatcher(run)
    watcher.update_readable()
    assert [each.partition("; ")[0] for each in watcher.damaged] == [
        f"{run.metrics_file}, line {number}: time: Field required" for number in (1, 2, 3)
    ]
    assert len(watcher.view.steps) == 1


def test_a_file_that_cannot_be_read_is_named_once_and_tried_again(run: RunDirectory) -> None:
    add(run, stepped(0, 2.0))
    run.events_file.mkdir()
    watcher = RunWatcher(run)
    for _ in range(2):
        watcher.update_readable()
    assert watcher.damaged == [f"{run.events_file}: cannot be read: Is a directory"]
    assert len(watcher.view.steps) == 1, "the other file is read"
    run.events_file.rmdir()
    add(run, started())
    assert [type(record) for record in watcher.update_readable()] == [Started]


def test_a_run_whose_address_cannot_be_read_may_have_a_coordinator(run: RunDirectory) -> None:
    watcher = RunWatcher(run)
    assert watcher.has_coordinator() is True
    run.control_file.write_text("")
    assert watcher.has_coordinator() is None
    run.remove_control()
    assert watcher.has_coordinator() is False


# --- the condition ---------------------------------------------------------------------------------------------------


def test_the_condition_follows_the_run(run: RunDirectory) -> None:
    clock = Clock()
    watcher = RunWatcher(run, clock=clock)

    def condition(*lines: dict[str, object], at: float) -> str:
        add(run, *lines)
        clock.at = at
        watcher.update()
        return watcher.report().condition

    assert condition(at=0.0) == "waiting"
    assert condition(started(), stepped(0, 1.0), at=2.0) == "training"
    assert condition(at=10.9) == "training", "ten seconds are patience enough"
    assert condition(at=11.1) == "silent"
    read = event("waiting", 11.2, worker=2, doing="reading sample 7", since_s=10.0, limit_s=600.0)
    assert condition(read, at=11.9) == "reading"
    assert condition(stepped(1, 12.0), lost(3, 13.0), at=13.5) == "recovering"
    assert watcher.report().reason == "lost 3; no step is committed since"
    assert condition(failed(3, 14.0), at=14.0) == "recovering", "no step is committed yet"
    assert condition(stepped(2, 14.5, is_rest=True), at=14.6) == "training"
    run.remove_control()
    assert condition(at=14.7) == "lost"
    assert condition(event("finished", 15.0, status="finished", reason="all steps are trained"), at=99.0) == "finished"
    assert watcher.report().eta_s is None


def test_a_resumed_run_trains_again(run: RunDirectory) -> None:
    ended = event("finished", 3.0, status="interrupted", reason="by its user")
    add(run, started(), stepped(0, 1.0), stepped(1, 2.0), ended)
    add(run, started(1000.0, steps=40), stepped(2, 1001.0))
    report = watched(run, 1001.5).report()
    assert (report.condition, report.steps, report.began) == ("training", 40, BEGAN)
    # Of the 1001 seconds since the beginning the run was up for 4, in which three steps of one second were trained.
    assert report.goodput == pytest.approx(3 / 4)


# --- the figures -----------------------------------------------------------------------------------------------------


def test_pace_goodput_and_end(run: RunDirectory) -> None:
    add(run, started(steps=100), *(stepped(step, step + 1.0) for step in range(40)))
    add(run, *(stepped(40 + step, 42.0 + 2.0 * step, step_s=2.0) for step in range(20)))
    report = watched(run, 80.5).report()
    assert report.pace is not None
    assert report.earlier is not None
    assert (report.pace.step_s, report.pace.tokens_per_s) == (2.0, 200.0)
    assert (report.earlier.step_s, report.earlier.tokens_per_s) == (1.0, 400.0)
    assert report.goodput == pytest.approx(1.0)
    assert report.eta_s == pytest.approx(40 * 2.0)
    assert report.tokens == 60 * 400


def test_repeated_steps_and_stalls_are_no_goodput(run: RunDirectory) -> None:
    add(run, started(), *(stepped(step, step + 1.0) for step in range(4)))
    add(run, stepped(2, 6.0), stepped(3, 7.0), stepped(4, 10.0, step_s=3.0, is_rest=True))
    report = watched(run, 10.0).report()
    assert report.goodput == pytest.approx(5 / 10)
    assert report.tokens == 5 * 400


def test_a_day_later_the_pace_is_compared_with_that_of_the_day_before(run: RunDirectory) -> None:
    day = 86_400.0
    add(run, started(steps=10_000), *(stepped(step, step + 1.0, step_s=5.0) for step in range(30)))
    add(run, *(stepped(30 + step, day + step, step_s=1.0) for step in range(30)))
    report = watched(run, day + 200).report()
    assert report.earlier is not None
    assert (report.earlier.since, report.earlier.step_s) == ("a day ago", 5.0)


def test_failures_by_phase_and_the_expected_next_one(run: RunDirectory) -> None:
    add(run, started(), stepped(0, 1.0))
    calm = watched(run, 1.0).report()
    add(run, failed(2, 1.5), failed(3, 1.5), failed(0, 2.5, generation=3, detect_s=None))
    cost = {"step": 3, "predicted_steps": None}
    add(run, event("failure_cost", 3.0, incident_generations=[2], failure_cost_steps=1.5, **cost), stepped(1, 4.0))
    report = watched(run, 4.0).report()
    assert (report.costs.failures, report.costs.incidents, report.costs.steps) == (3, 2, 1.5)
    assert report.costs.causes == {"SIGKILL": 3}
    assert ("causes", "SIGKILL (3)") in facts_of(report)
    assert report.costs.phases_s["detect"] == pytest.approx(0.01)
    assert report.costs.phases_s["regroup"] == pytest.approx(0.2)
    assert report.costs.stall_s == pytest.approx(0.01 + 2 * 0.123)
    assert calm.next_failure_s is not None
    assert report.next_failure_s is not None
    assert report.next_failure_s < calm.next_failure_s / 10


def test_each_worker_has_a_state(run: RunDirectory) -> None:
    add(run, started(), event("slow", 1.0, worker=1, speed=0.5, **SLOW), lost(3, 2.0))
    add(run, event("respawn", 2.1, worker=3, incarnation=2), failed(3, 2.2), event("draining", 2.3, workers=[2]))
    add(run, event("slow_link", 2.4, workers=[2, 0], speed=0.25, **SLOW))
    report = watched(run, 3.0).report()
    assert dict(report.workers) == {"live": (0,), "slow": (1,), "draining": (2,), "joining": (3,)}
    assert describe_workers(report) == "1 live, 1 slow (1), 1 draining (2), 1 joining (3)"
    assert (dict(report.speeds), dict(report.link_speeds)) == ({1: 0.5}, {"0-2": 0.25})
    assert report.hosts[3] == "b"
    add(run, event("joined", 4.0, worker=3, host="c", incarnation=2), event("drained", 4.1, worker=2))
    add(run, event("recovered", 4.2, worker=1), lost(0, 4.3, host=""), failed(0, 4.4))
    report = watched(run, 5.0).report()
    assert dict(report.workers) == {"live": (1, 3), "lost": (0,), "left": (2,)}
    assert report.hosts[3] == "c"


def test_the_newest_checkpoint_and_what_came_after_it(run: RunDirectory) -> None:
    add(run, started(), stepped(0, 1.0), event("checkpoint", 2.0, step=1), event("snapshot", 3.0, step=2))
    add(run, event("checkpoint_failed", 4.0, step=3, error="disk full"))
    facts = dict(facts_of(watched(run, 62.0).report()))
    assert facts["checkpoint"] == "of step 1, 60.00 s ago" or facts["checkpoint"].startswith("of step 1, 60")
    assert facts[""] == "a later one failed: step 3: disk full"
    assert facts["snapshot"].startswith("of step 2, 59")
    add(run, event("checkpoint", 5.0, step=4))
    assert "" not in dict(facts_of(watched(run, 62.0).report()))


def test_a_report_is_json(run: RunDirectory) -> None:
    assert watched(run, 0.0).report().to_json()["last"] is None
    add(run, started(), stepped(0, 1.0), event("checkpoint", 2.0, step=1), failed(1, 3.0))
    values = watched(run, 4.0).report().to_json()
    assert values["checkpoint"] == {"step": 1, "time": BEGAN + 2.0, "age_s": 2.0}
    assert values["last_step_age_s"] == 3.0
    assert values["last"]["tokens_per_s"] == 400.0
    assert values["costs"]["incidents"] == 1


def test_a_long_run_is_a_short_curve(run: RunDirectory) -> None:
    add(run, started(steps=1000), *(stepped(step, step + 1.0, loss=float(step)) for step in range(1000)))
    view = watched(run, 1000.0).view
    series = view.steps.series(100).columns
    assert len(series["loss"]) == 100
    assert series["loss"][0] == pytest.approx(4.5)
    assert series["step"][-1] == 999
    assert view.steps.series(100, since=995).columns["step"] == [995, 996, 997, 998, 999]
