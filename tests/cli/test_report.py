"""`chameleon report`: a run's records beside its predictions, as a table, JSON, picture and trace."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.observe import GenerationPlan, RunDirectory, TimelineLog
from tests.observe.test_comparison import planned, recorded


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two generations, the second without worker 1 and twice as slow as predicted."""
    config = RunConfig(workers=4, parallel=Parallel(dp=2, pp=2), batch=Batch(micro_batches=6, micro_batch_size=1))
    found = RunDirectory.create(tmp_path / "run", config)
    found.plans.mkdir()
    for plan, steps, factor in ((planned(1), (0, 1, 2), 1.0), (planned(2, lost=(1,)), (3, 4), 2.0)):
        _write(found, plan, steps, factor)
    return found


def _write(run: RunDirectory, plan: GenerationPlan, steps: tuple[int, ...], factor: float) -> None:
    plan.write(run.plan_file(plan.generation))
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
    assert printed.rstrip().splitlines()[-1].startswith("prediction not to be trusted: step time 50.0% off")


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
    events: list[dict[str, object]] = [
        {"event": "started", "generation": 1},
        {"event": "failure", "worker": 7, "generation": 1},
        {"event": "failure", "worker": 8, "generation": 2},
        {"event": "join", "workers": [8], "spares": [], "generation": 2},
        {"event": "failure", "worker": 9, "generation": 3},
    ]
    run.events_file.write_text("".join(json.dumps({"time": 0.0, **event}) + "\n" for event in events))
    picture = tmp_path / "step.svg"
    assert main(["report", str(run.path), "--picture", str(picture)]) == 0
    assert re.findall("<!-- worker ([0-9]), lost -->", picture.read_text()) == ["1", "7"]


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
