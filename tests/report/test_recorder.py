"""The recorder flushes every record, survives a crash, and summarizes the files."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.config import TrainConfig
from chameleon_ft.events.kinds import CheckpointComplete
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import Recorder, View, line_of
from tests.report.records import failure_record, outcome_record, run_info, step_record


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", TrainConfig())


def recorder(run: RunDirectory) -> Recorder:
    ticks = itertools.count(100.0)
    return Recorder(run, View(), clock=lambda: next(ticks))


def test_records_are_on_disk_before_the_recorder_is_closed(run: RunDirectory) -> None:
    with recorder(run) as records:
        records.record(run_info())
        records.record(step_record(0))
        records.record(failure_record(1))
        records.record(CheckpointComplete(step=1))
        assert run.steps() == [step_record(0)]
        assert [replace(failure, time=0.0) for failure in run.failures()] == [failure_record(1)]
        assert [(event.time, event.name) for event in run.events()] == [
            (100.0, "started"),
            (101.0, "failure"),
            (102.0, "checkpoint"),
        ]


def test_a_resumed_run_removes_a_line_that_a_crash_cut_short(run: RunDirectory) -> None:
    with recorder(run) as records:
        records.record(step_record(0))
    with run.metrics_file.open("a") as file:
        file.write('{"step": 1, "lo')
    with recorder(run) as records:
        records.record(step_record(1))
    assert [record.step for record in run.steps()] == [0, 1]


def test_the_summary_covers_the_records_before_a_resume(run: RunDirectory) -> None:
    with recorder(run) as records:
        records.record(step_record(0))
        records.finish("interrupted", reason="Ctrl-C")
    with recorder(run) as records:
        records.record(step_record(1))
        summary = records.finish("finished", reason="all steps are done")
    assert summary.steps == 2
    assert json.loads(run.summary_file.read_text())["reason"] == "all steps are done"


def test_the_summary_has_the_fields_that_are_promised(run: RunDirectory) -> None:
    with recorder(run) as records:
        records.record(step_record(0))
        records.record(failure_record(0))
        records.record(outcome_record())
        records.finish("finished", reason="done")
    data = json.loads(run.summary_file.read_text())
    assert {"steps", "final_loss", "samples_seen", "samples_lost", "samples_repeated", "failures"} <= set(data)
    assert {"median_step_s_before", "median_step_s_after", "status", "reason"} <= set(data)
    assert data["outcomes"] == [outcome_record().values()]
    phases = {"detect_s", "stop_s", "decide_s", "regroup_s", "stall_s"}
    assert {"worker", "step", "cause", "policy"} | phases <= set(data["failures"][0])


def test_the_metrics_have_the_fields_that_are_promised(run: RunDirectory) -> None:
    with recorder(run) as records:
        records.record(step_record(0))
    promised = {"step", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "workers", "generation"}
    assert promised <= set(json.loads(run.metrics_file.read_text()))


def test_lines_that_are_missing_are_written_and_no_other(run: RunDirectory) -> None:
    lines = [line_of(each) for each in (step_record(0), failure_record(1), outcome_record(), step_record(1))]
    with recorder(run) as records:
        records.record(step_record(0))
        records.record(failure_record(1))
    with recorder(run) as records:
        records.complete(lines)
        records.complete(lines)
    assert run.steps() == [step_record(0), step_record(1)]
    assert [replace(event, time=0.0) for event in run.events()] == [failure_record(1), outcome_record()]


def test_a_run_ends_and_changes_its_coordinator_whatever_lines_are_damaged(run: RunDirectory) -> None:
    with recorder(run) as records:
        records.record(step_record(0))
    for file in (run.metrics_file, run.events_file):
        with file.open("ab") as opened:
            opened.write(bytes(60) + b'\n3\n{"event": "failure", "time": 1, "step": "x"}\n')
    with recorder(run) as records:
        records.complete([line_of(step_record(0)), line_of(step_record(1))])
        summary = records.finish("finished", reason="all steps are trained")
    assert (summary.steps, summary.failures) == (2, ())
