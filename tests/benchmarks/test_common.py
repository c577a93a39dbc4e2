"""Reports of the benchmarks: spreads, bars and the machine."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from benchmarks import _torchft
from benchmarks._common import ROOT, Bar, Report, Spread
from benchmarks._stamped_job import Stamp, read_stamps


def test_a_spread_shows_the_median_and_the_extremes() -> None:
    spread = Spread((0.3, 0.1, 0.2))

    assert spread.median == 0.2
    assert spread.shown(1) == "0.2 (0.1 to 0.3)"
    assert spread.to_json()["values"] == [0.3, 0.1, 0.2]
    assert Spread((1.0,)).to_json()["quartiles"] == [1.0, 1.0]


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


def test_stamps_of_all_processes_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "stamps").mkdir()
    for process, time in ((1, 2.0), (2, 1.0)):
        line = json.dumps({"time": time, "process": process, "event": "update", "step": 3})
        (tmp_path / "stamps" / f"{process}.jsonl").write_text(f"{line}\n", encoding="utf-8")

    assert read_stamps(tmp_path) == [
        Stamp(time=1.0, process=2, event="update", step=3),
        Stamp(time=2.0, process=1, event="update", step=3),
    ]


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


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")))
def test_every_script_begins(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{script}").main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
