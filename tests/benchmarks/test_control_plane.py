"""The load generator of the control plane, against a real coordinator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._common import ROOT, worker_environment


@pytest.mark.multiprocess
def test_ranks_join_are_lost_and_get_new_orders(tmp_path: Path) -> None:
    out, picture = tmp_path / "out", tmp_path / "growth.svg"
    command = [sys.executable, "-m", "benchmarks.control_plane", "--ranks", "32", "--losses", "2", "--max-others", "1"]
    command += ["--heartbeats-s", "0.5", "--out", str(out), "--picture", str(picture)]
    ended = subprocess.run(command, cwd=ROOT, env=worker_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (measured,) = json.loads((out / "report.json").read_text())["measured"]
    assert measured["ranks"] == 32
    assert len(measured["losses"]["values"]) == 2
    assert measured["takeover_s"] > 0
    assert "<svg" in picture.read_text()
    events = [json.loads(line) for line in (out / "32" / "run" / "events.jsonl").read_text().splitlines()]
    failures = [event for event in events if event["event"] == "failure"]
    assert [each["worker"] for each in failures] == [0, 25]
    assert {each["noticed_by"] for each in failures} <= {"child", "connection"}
    assert [each["policy"] for each in events if each["event"] == "plan"] == ["start", *["reroute", "redundancy"] * 2]
    assert not [each for each in events if each["event"] in ("host_lost", "discarded")]
