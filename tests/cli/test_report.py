"""`chameleon report`: a run's records beside its predictions, as a table, JSON, picture and trace."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import write_generation
from chameleon_ft.storage.timelines import TimelineLog
from tests.report.live.lines import add, event, failed, started
from tests.report.records import join_record
from tests.report.test_comparison import planned, recorded


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two generations, the second without worker 1 and twice as slow as predicted."""
    config = RunConfig(workers=4, parallel=Parallel(dp=2, pp=2), batch=Batch(micro_batches=6, micro_batch_size=1))
    found = RunDirectory.create(tmp_path / "run", config)
    found.plans.mkdir()
    for plan, steps, factor in ((planned(1), (0, 1, 2), 1.0), (planned(2, lost=(1,)), (3, 4, 5), 2.0)):
        _write(found, plan, steps, factor)
    return found


def _write(run: RunDirectory, plan: GenerationSpec, steps: tuple[int, ...], factor: float) -> None:
    write_generation(plan, run.plan_file(plan.generation))
    for step in steps:
        for part in recorded(plan, step, factor=factor, overhead_s=0.0):
            TimelineLog(run.timeline_file(part.worker)).append(part)


def test_every_generation_is_reported(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "generation 1, from step 3 with 4 workers; predicted by its profile" in printed
    assert "generation 2, from step 3 with 3 workers; predicted by its profile" in printed
    assert "| step     |      2 |" in printed
    assert "-50.00%" in printed
    assert printed.count("prediction not to be trusted") == 1
    assert "\ngeneration 2: prediction not to be trusted: step time 50.0% off" in printed


@pytest.mark.parametrize("step", [3, 4])  # the first of a generation, and another
def test_one_step_is_printed_alone_and_proves_little(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    assert main(["report", str(run.path), "--step", str(step), "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["generations"]
    assert [each["step"] for each in only["steps"]] == [step]
    assert only["error"] == pytest.approx(-0.5, abs=1e-6)
    assert only["warning"] is None
    assert main(["report", str(run.path), "--step", str(step)]) == 0
    assert "generation 1," not in capsys.readouterr().out


def test_evaluations_are_reported_the_newest_and_the_best(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [3.0, 1.0, *(2.0 + step for step in range(11))]
    fields = {"samples": 1, "terms": 1.0, "seconds": 0.1, "generation": 1}
    events = [
        {"event": "evaluation", "time": float(step), "step": step, "loss": loss, "metrics": {"accuracy": 0.5}, **fields}
        for step, loss in enumerate(losses)
    ]
    run.events_file.write_text("".join(f"{json.dumps(each)}\n" for each in events))
    assert main(["report", str(run.path)]) == 0
    printed = capsys.readouterr().out.partition("evaluations, without 2 earlier ones")[2]
    best = next(line for line in printed.splitlines() if "least loss" in line)
    assert best.split()[1:6] == ["after", "step", "1", "|", "1"]
    assert "after step 2 " not in printed
    assert "after step 12 |   12 |      0.5 |" in printed
    assert main(["report", str(run.path), "--json"]) == 0
    assert [each["loss"] for each in json.loads(capsys.readouterr().out)["evaluations"]] == losses


def test_errors_of_several_generations_are_one_warning(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    _write(run, planned(3), (6, 7, 8), 4.0)
    assert main(["report", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not to be trusted") == printed.count("chameleon profile") == 1
    assert "\ngenerations 2-3, most in generation 3: prediction not to be trusted: step time 75.0% off" in printed


def test_the_report_is_there_as_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["generations"]
    assert first["error"] == pytest.approx(0, abs=1e-6)
    assert [step["step"] for step in first["steps"]] == [1, 2]
    assert second["error"] == pytest.approx(-0.5, abs=1e-6)
    assert first["warning"] is None
    assert second["warning"].startswith("prediction not to be trusted: step time 50.0% off, 6% is tolerated")
    assert second["kinds"]["B"]["mean_error"] == pytest.approx(0.5, abs=1e-6)


def test_predicted_and_measured_are_drawn_and_traced(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert main(["report", str(run.path), "--step", "4", "--picture", str(picture), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.endswith(f"picture written to {picture}\ntrace written to {trace}\n")
    assert "worker 1, lost" in picture.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert names == {"predicted", "measured"}


def test_workers_lost_before_a_repartition_are_drawn(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    back = dataclasses.replace(join_record(3), workers=(8,), generation=2).to_json()
    add(run, started(), failed(7, 1.0, generation=1), failed(8, 2.0), event("join", 3.0, **back))
    add(run, failed(9, 4.0, generation=3))
    picture = tmp_path / "step.svg"
    assert main(["report", str(run.path), "--picture", str(picture)]) == 0
    assert re.findall("<!-- worker ([0-9]), lost -->", picture.read_text()) == ["1", "7"]


@pytest.fixture
def interrupted(run: RunDirectory) -> RunDirectory:
    """The run, in which worker 1 was lost in the middle of step 3, between its two generations."""
    (run.path / "timelines").rename(run.path / "before")
    plan, half, stopped_at = planned(1), 2, 0.0
    for part in recorded(plan, 3, overhead_s=0.0):
        kinds = "".join(operation.kind.value for operation in plan.program.of(part.worker))
        end_s = part.operations[half - 1][1]
        stopped_at = max(stopped_at, part.time + end_s)
        first = dataclasses.replace(
            part, operations=part.operations[:half], kinds=kinds[:half], reductions=(), end_s=end_s, part="interrupted"
        )
        rest = dataclasses.replace(
            part, time=part.time + 30.0, operations=part.operations[half:], kinds=kinds[half:], part="rest"
        )
        log = TimelineLog(run.timeline_file(part.worker))
        if part.worker != 1:
            log.defer(first)
            assert not run.timeline_file(part.worker).exists()
            log.append(rest)
    for path in (run.path / "before").iterdir():
        with run.timeline_file(int(path.stem.removeprefix("worker-"))).open("a") as file:
            file.write(path.read_text())
    times = {"detect_s": None, "stop_s": 1.0, "decide_s": 0.5, "regroup_s": 0.5, "stall_s": 2.0}
    failure = FailureRecord(
        worker=1,
        step=3,
        cause="SIGKILL",
        noticed_by="child",
        policy="reroute",
        action="reroute",
        generation=2,
        resume_step=3,
        is_salvaged=True,
        **times,  # type: ignore[arg-type]
    )
    line = {"time": stopped_at + 1.0, "event": "failure", **dataclasses.asdict(failure)}
    run.events_file.write_text(json.dumps(line) + "\n")
    return run


def test_a_failure_is_drawn(interrupted: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "failure.svg"
    assert main(["report", str(interrupted.path), "--failure", "1", "--picture", str(picture)]) == 0
    assert capsys.readouterr().out == f"picture written to {picture}\n"
    drawn = picture.read_text()
    assert "the loss of worker 1 stopped training for 2.000 s; step 3 was completed" in drawn
    assert [f"<!-- worker {worker} -->" in drawn for worker in range(5)] == [True] * 4 + [False]
    assert main(["report", str(interrupted.path)]) == 0, "whole steps are compared as before"
    assert "| step     |      2 |" in capsys.readouterr().out


def test_a_failure_is_drawn_without_a_whole_step(
    interrupted: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for path in interrupted.timelines.iterdir():
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{line}\n" for line in lines if json.loads(line).get("part", "whole") != "whole"))
    picture = tmp_path / "failure.svg"
    assert main(["report", str(interrupted.path)]) == 2, "there is no step to compare"
    assert "no whole step of it was recorded" in capsys.readouterr().err
    assert main(["report", str(interrupted.path), "--failure", "1", "--picture", str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"failure": 1, "damaged_lines": []}
    assert "step 3 was completed" in picture.read_text()


def test_a_failure_that_cannot_be_drawn_is_refused(
    interrupted: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = str(tmp_path / "failure.svg")
    for arguments, message in (
        (["--failure", "2", "--picture", picture], "has no such failure; it has 1"),
        (["--failure", "1"], "give it with --picture"),
        (["--failure", "1", "--picture", picture, "--step", "4"], "without --trace and --step"),
    ):
        assert main(["report", str(interrupted.path), *arguments]) == 2
        assert message in capsys.readouterr().err
    for path in interrupted.timelines.iterdir():
        path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if '"interrupted"' not in line))
    assert main(["report", str(interrupted.path), "--failure", "1", "--picture", picture]) == 2
    assert "step 3, which it interrupted, was not recorded" in capsys.readouterr().err


def test_a_step_that_was_not_recorded_is_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--step", "9"]) == 2
    assert "--step 9: was not recorded; those that were: 1, 2, 4" in capsys.readouterr().err


def test_a_run_without_records_says_how_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(workers=4, parallel=Parallel(dp=2, pp=2))
    RunDirectory.create(tmp_path / "run", config)
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "no whole step of it was recorded; a run records some if timelines.every is above 0" in (
        capsys.readouterr().err
    )
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
