"""Reports of the benchmarks: spreads, bars and the machine."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from benchmarks import _torchft
from benchmarks._common import ROOT, STAMPED_JOB, Bar, Report, Spread, base_config
from benchmarks._plain_ranks import rank_config
from benchmarks._stamped_job import Stamp, read_stamps
from benchmarks.fidelity import Place
from chameleon_ft.config import Failure


def test_a_spread_shows_the_median_and_the_extremes() -> None:
    spread = Spread((0.3, 0.1, 0.2))

    assert spread.median == 0.2
    assert spread.shown(1) == "0.2 (0.1 to 0.3)"
    assert spread.to_json()["values"] == [0.3, 0.1, 0.2]
    assert Spread((1.0,)).to_json()["quartiles"] == [1.0, 1.0]


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread(())


@pytest.mark.parametrize(("at_least", "reached"), [(False, True), (True, False)])
def test_a_bar_is_a_ceiling_or_a_floor(at_least: bool, reached: bool) -> None:
    bar = Bar(name="a", value=1.0, limit=2.0, at_least=at_least)

    assert bar.reached is reached
    assert str(bar).startswith("reached" if reached else "MISSED")


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (3.0, 1)])
def test_a_report_is_written_and_printed(
    value: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = Bar(name="a", value=value, limit=2.0)
    report = Report(benchmark="b", columns=("x", "y"), rows=(("1", "2"),), bars=(bar,), results={"numbers": [1]})

    assert report.emit(tmp_path, as_json=True) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert printed["numbers"] == [1]
    assert printed["bars"][0]["reached"] is (code == 0)


def test_a_rank_trains_in_the_directory_that_it_is_given(tmp_path: Path) -> None:
    config = rank_config(ROOT / "examples" / "quickstart.toml", out=tmp_path)
    assert config.output_dir == tmp_path


def test_the_base_configuration_is_without_failures_and_checkpoints() -> None:
    config = base_config(ROOT / "examples" / "quickstart.toml", steps=7)

    assert (config.steps, config.failures, config.checkpoint.every) == (7, (), 0)
    assert config.job == STAMPED_JOB


def test_stamps_of_all_processes_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "stamps").mkdir()
    for process, time in ((1, 2.0), (2, 1.0)):
        line = json.dumps({"time": time, "process": process, "event": "update", "step": 3})
        (tmp_path / "stamps" / f"{process}.jsonl").write_text(f"{line}\n", encoding="utf-8")

    assert read_stamps(tmp_path) == [
        Stamp(time=1.0, process=2, event="update", step=3),
        Stamp(time=2.0, process=1, event="update", step=3),
    ]


def test_a_place_names_the_lost_workers_and_their_steps() -> None:
    place = Place.parse("5@10,2@25")

    assert place.failures() == [
        Failure(worker=5, step=10, phase="backward"),
        Failure(worker=2, step=25, phase="sync"),
    ]


@pytest.mark.parametrize("text", ["", "5@10", "5@10,2", "a@1,2@3"])
def test_a_place_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="WORKER@STEP"):
        Place.parse(text)


def test_settings_of_torchft_become_the_flags_of_their_processes() -> None:
    settings = _torchft.Settings(heartbeat_ms=10, heartbeat_timeout_ms=100)

    assert settings.replica_flags() == ["--heartbeat-ms=10"]
    assert settings.lighthouse_flags() == ["--heartbeat_timeout_ms=100"]
    assert _torchft.Settings().replica_flags() == _torchft.Settings().lighthouse_flags() == []
    assert str(_torchft.Settings()) == "default"


def test_workability_asks_for_all_before_the_kill_and_all_survivors_after_it(tmp_path: Path) -> None:
    fault = {"time": 1.0, "worker": 0, "kind": "kill", "phase": "forward", "step": 1}
    (tmp_path / "faults.jsonl").write_text(json.dumps(fault) + os.linesep, encoding="utf-8")
    _write_attempts(tmp_path, 0, [(0, True, 3)])
    _write_attempts(tmp_path, 1, [(0, True, 3), (1, False, 3), (1, True, 2)])
    _write_attempts(tmp_path, 2, [(0, True, 3), (1, True, 2)])
    assert _torchft.together(tmp_path, replica=0, replicas=3)

    _write_attempts(tmp_path, 2, [(0, True, 3), (1, True, 1)])
    assert not _torchft.together(tmp_path, replica=0, replicas=3)

    _write_attempts(tmp_path, 2, [(0, True, 2), (1, True, 2)])
    assert not _torchft.together(tmp_path, replica=0, replicas=3)


def _write_attempts(folder: Path, replica: int, attempts: list[tuple[int, bool, int]]) -> None:
    lines = [
        json.dumps({"time": 0.0, "step": step, "committed": committed, "participants": participants})
        for step, committed, participants in attempts
    ]
    (folder / f"replica-{replica}.jsonl").write_text("\n".join(lines), encoding="utf-8")
