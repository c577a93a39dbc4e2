"""The clock of a run in the comparison of policies, and what is read from its records."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _policies_run
from benchmarks._policies_run import _Watch
from benchmarks._policies_scenarios import Loss
from chameleon_ft.errors import ConfigError
from chameleon_ft.storage.files import RunDirectory


class Script:
    """A run directory whose files grow as the test says, and the watch that reads them."""

    def __init__(self, path: Path, losses: list[Loss], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.killed: list[int] = []
        self.live = set(range(8))
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(_policies_run, "inject", self._inject)
        self.run = RunDirectory(path)
        self.watch = _Watch(run=self.run, losses=losses, duration_s=100.0, restart_s=50.0)

    def _inject(self, run: RunDirectory, *, worker: int, **_: object) -> None:
        if worker not in self.live:
            raise ConfigError(f"worker {worker} is not live")
        self.live.discard(worker)
        self.killed.append(worker)

    def step(self, number: int, *, generation: int = 1, after_s: float = 2.0) -> float:
        self.now += after_s
        self._append(self.run.metrics_file, step=number, generation=generation, samples=8, step_s=after_s)
        return self.watch.look()

    def event(self, name: str, **fields: Any) -> None:
        self._append(self.run.events_file, time=self.now, event=name, **fields)

    def failure(self, policy: str, worker: int = 5) -> None:
        self.event("failure", generation=2, policy=policy, worker=worker, stall_s=1.5, moved_bytes=7)

    def _append(self, path: Path, **fields: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def test_the_window_begins_with_the_third_step_and_losses_come_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path, [Loss(1.0, (5,)), Loss(3.0, (5, 6))], monkeypatch)
    assert [script.step(number) for number in range(3)] == [-1.0, -1.0, 0.0]
    assert [commit.at_s for commit in script.watch.commits] == [-4.0, -2.0, 0.0]
    assert script.killed == []
    script.step(3)
    assert script.killed == [5]
    script.step(4)
    assert script.killed == [5, 6]
    assert script.watch.skipped == [5]
    assert [(change.at_s, change.worker) for change in script.watch.changes] == [(2.0, 5), (4.0, 6)]


@pytest.mark.parametrize(("policy", "charged_s"), [("restart", 48.5), ("checkpoint", 48.5), ("repair", 0.0)])
def test_a_return_to_a_checkpoint_is_charged_once(
    policy: str, charged_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path, [Loss(10.0, (6,))], monkeypatch)
    for number in range(3):
        script.step(number)
    script.failure(policy)
    script.failure(policy, worker=4)
    script.step(2, generation=2)
    assert script.watch.commits[-1].at_s == pytest.approx(2 + charged_s)
    assert [outage.charged_s for outage in script.watch.outages] == [charged_s]
    assert script.killed == ([6] if charged_s else []), "what was to happen meanwhile happens when it goes on"
