"""Costs of losses by the records of a run, and what follows from them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._common import ROOT
from benchmarks._failure_costs import LossCost, costs_of, draws
from benchmarks.failure_cost import Measured, bars, emulated_config, large_config, real_config
from chameleon_ft.config import parse_config
from chameleon_ft.events.decisions import Migration
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.storage.files import RunDirectory


def test_draws_are_those_of_their_seed_and_spread_over_workers_and_moments() -> None:
    drawn = draws("0 real 1", workers=8, count=400)
    assert drawn == draws("0 real 1", workers=8, count=400)
    assert drawn[:5] == draws("0 real 1", workers=8, count=5), "a shorter run has the same first losses"
    assert drawn != draws("0 real 2", workers=8, count=400)
    assert {draw.worker for draw in drawn} == set(range(8))
    assert {int(10 * draw.moment) for draw in drawn} == set(range(10))


class Records:
    """The files of a run: steps of 2 s, the fifth of which loses worker 5 after a second."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory(path)
        for step in range(5):
            self.step(step, at_s=100.0 + 2 * step, generation=1)

    def step(self, step: int, *, at_s: float, generation: int, step_s: float = 2.0) -> None:
        row = {"step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "samples": 8, "tokens": 8}
        self._append(
            self.run.metrics_file, **row, step_s=step_s, workers=8, generation=generation, time=at_s, tokens_per_s=4
        )

    def failure(self, *, at_s: float, step: int, generation: int, **changes: Any) -> None:
        record = FailureRecord(
            worker=5,
            step=step,
            cause="killed",
            noticed_by="child",
            detect_s=0.1,
            stop_s=0.1,
            decide_s=0.1,
            regroup_s=0.1,
            stall_s=0.4,
            policy="reroute",
            action="others take its share",
            generation=generation,
            resume_step=step,
            repeated_s=0.25,
            is_salvaged=True,
        )
        self._append(self.run.events_file, **replace(record, time=at_s, **changes).to_json())

    def migration(self, *, generation: int, num_bytes: int) -> None:
        self._append(
            self.run.events_file, **Migration(generation=generation, step=0, layers=1, bytes=num_bytes).to_json()
        )

    def cost(self, *generations: int, steps: float, predicted: float | None) -> None:
        fields = {"failure_cost_steps": steps, "predicted_steps": predicted}
        self._append(
            self.run.events_file, time=0.0, event="failure_cost", incident_generations=generations, step=0, **fields
        )

    def _append(self, path: Path, **fields: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def test_a_loss_costs_the_time_by_which_its_step_is_longer(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.failure(at_s=109.4, step=5, generation=2)
    assert costs_of(records.run) == (), "not committed yet"
    records.cost(2, steps=0.2, predicted=0.15)
    records.migration(generation=2, num_bytes=7_000)
    records.migration(generation=3, num_bytes=1)
    records.step(5, at_s=110.4, generation=2, step_s=0.9)
    (cost,) = costs_of(records.run)
    assert (cost.worker, cost.step, cost.is_salvaged, cost.stall_s, cost.moved_bytes) == (5, 5, True, 0.4, 7_000)
    assert (cost.cost, cost.repeated, cost.moment, cost.step_s) == pytest.approx((0.2, 0.125, 0.5, 2.0))
    assert (cost.recorded, cost.predicted, cost.prediction_error) == pytest.approx((0.2, 0.15, -0.25))
    assert cost.inconsistency == pytest.approx(0.0, abs=1e-9)


def loss(**changes: Any) -> LossCost:
    base = LossCost(
        worker=1,
        step=5,
        moment=0.5,
        step_s=2.0,
        cost=0.15,
        repeated=0.05,
        stall_s=0.1,
        moved_bytes=0,
        recorded=0.15,
        predicted=0.15,
        inconsistency=0.0,
        is_salvaged=True,
        is_first_layout=True,
        policy="reroute",
        action="others take its share",
    )
    return replace(base, **changes)


def measured(part: str, setting: str, *costs: float, **changes: Any) -> Measured:
    losses = tuple(loss(cost=each, is_salvaged=setting == "salvage", **changes) for each in costs)
    return Measured(part=part, setting=setting, costs=losses)


def test_bars_are_of_the_parts_that_were_measured() -> None:
    emulated = [measured("emulated", "salvage", 0.1, 0.15, 0.5), measured("emulated", "no salvage", 0.6)]
    assert {bar.name: bar.reached for bar in bars(emulated)} == {
        "emulated, median cost": True,
        "emulated, 90th percentile": False,
        "emulated, mean error of predicted cost": True,
    }
    real = [measured("real", "salvage", 0.4, repeated=0.2, predicted=0.3), measured("real", "no salvage", 0.8)]
    assert {bar.name: bar.value for bar in bars(real)} == pytest.approx(
        {
            "real, median of repeated work": 0.2,
            "real, cost with salvage over without, medians": 0.5,
            "real, mean error of predicted cost": 1.0,
        }
    )


def settings(**changes: Any) -> argparse.Namespace:
    given = {
        "config": ROOT / "examples" / "quickstart.toml",
        "profile": ROOT / "profiles" / "llama2-7b-h100-80g.json",
        "losses": 30,
        "losses_per_run": 1,
        "settled": 6,
        "seed": 0,
        "policy": "chameleon",
        "time_scale": 2.0,
        "respawn_delay_s": 6.0,
    }
    return argparse.Namespace(**given | changes)


def test_workers_come_back_if_more_are_to_be_lost_and_nothing_else_fails() -> None:
    assert not real_config(settings()).recovery.respawn
    assert real_config(settings(losses_per_run=2)).recovery.respawn
    for config in (emulated_config(settings()), real_config(settings()), large_config(settings())):
        assert config.workers == config.parallel.dp * config.parallel.pp
        assert config.failures == ()
        assert config.checkpoint.every == 0
        assert parse_config(type(config), config.model_dump(), source="") == config
