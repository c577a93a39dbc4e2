"""Runs beside their simulations: a window by hand, and which runs the constants are from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trust
from benchmarks._policies_observed import Change, Commit, Observed
from benchmarks._trust_replay import made_in, replayed
from chameleon_ft.simulate import Parameters
from tests.simulate.runs import config, decision, failure, recorded, started

FAST_S = 12 * 0.18 + 2 * (1e-5 + 6 * 10**8 / 50e9)
SLOW_S = 24 * 0.18
WINDOW_S, LOST_S = 60.0, 20.0
PHASES = Parameters(detect_s=0.1, stop_s=0.2, decide_s=0.3, regroup_s=0.4, search_s=0.5, step_overhead_s=0.0)


def make(
    folder: Path,
    scenario: str,
    *,
    policy: str = "drop-replica",
    stall_s: float = 1.0,
    stop_s: float = 0.2,
    ended: str | None = None,
    every: int = 0,
) -> None:
    """A run of two workers, of which one is lost: by hand what the cost model says, but for its stall."""
    (folder / scenario).mkdir(parents=True, exist_ok=True)
    events = (started(), decision(2, prepared=True), failure(1021.0, detect_s=0.1, stop_s=stop_s, generation=2))
    recorded(folder / scenario / policy, events, of=config(policy=policy, every=every, restart_cost_s=30.0))
    before = [Commit(FAST_S * n, n, 1, 24, FAST_S) for n in range(1 + int(LOST_S / FAST_S))]
    begin_s = LOST_S + stall_s
    after = [Commit(begin_s + SLOW_S * n, 20 + n, 2, 24, SLOW_S) for n in range(1, 12)]
    observed = Observed(
        run=policy,
        duration_s=WINDOW_S,
        workers=2,
        commits=(*before, *([] if ended else after)),
        changes=(Change(LOST_S, 1, -1),),
        skipped=(),
        outages=(),
        outcomes=(),
        ended=ended,
    )
    observed.write(folder / scenario / f"{policy}.json")


def test_a_run_that_does_what_is_predicted_is_simulated_without_error(tmp_path: Path) -> None:
    make(tmp_path, "medium")
    (made,) = made_in([tmp_path])
    found = replayed(made, PHASES, by_class=True)
    by_hand = 24 * (LOST_S // FAST_S + (WINDOW_S - LOST_S - 1.0) / SLOW_S) / WINDOW_S
    assert found.real_per_s == pytest.approx(by_hand)
    assert found.simulated_per_s == pytest.approx(by_hand)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.by_class_error is not None
    assert abs(found.by_class_error) < 0.02


def test_a_restart_keeps_its_steps_and_takes_what_it_is_charged(tmp_path: Path) -> None:
    make(tmp_path, "medium", policy="restart", stall_s=30.0, every=2)
    (made,) = made_in([tmp_path])
    assert replayed(made, PHASES, by_class=False).error == pytest.approx(0.0, abs=1e-9)


def run_trust(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["trust", *arguments])
    return trust.main()


def test_the_report_has_the_mean_and_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    make(runs, "medium")
    make(runs, "rare", stall_s=9.0, stop_s=0.2)
    table = tmp_path / "table.md"
    arguments = ("--runs", str(runs), "--out", str(tmp_path / "out"), "--markdown", str(table), "--json")
    assert run_trust(monkeypatch, *arguments) == 1, "one of both is off by more than it may be"
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    errors = {each["scenario"]: each["error"] for each in report["runs"]}
    assert errors["medium"] == pytest.approx(0.0, abs=0.01)
    mean, worst = report["bars"]
    assert mean["value"] == pytest.approx(math.fsum(map(abs, errors.values())) / 2)
    assert (worst["value"], worst["reached"]) == (abs(errors["rare"]), False)
    assert (tmp_path / "out" / "trust.svg").stat().st_size
    assert _cells(table) == [
        ["real samples/s, error", "`drop-replica`"],
        ["---", "---"],
        ["rare", f"{report['runs'][0]['real_per_s']:.1f}, {errors['rare']:+.1%}"],
        ["medium", f"{report['runs'][1]['real_per_s']:.1f}, {errors['medium']:+.1%}"],
        ["mean size of the error", f"{mean['value']:.1%}"],
    ]


def _cells(table: Path) -> Sequence[Sequence[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.read_text().splitlines()]
