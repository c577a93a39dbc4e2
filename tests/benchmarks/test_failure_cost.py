"""Costs of losses by the records of a run, and what follows from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import failure_cost
from benchmarks._common import ROOT
from benchmarks._failure_costs import LossCost, _layout, costs_of, draws, read_costs, settled_step_s, write_costs
from benchmarks.failure_cost import Measured, bars, emulated_config, large_config, real_config
from chameleon_ft.config import parse_config
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.storage.files import RunDirectory


def test_draws_are_those_of_their_seed_and_spread_over_workers_and_moments() -> None:
    drawn = draws("0 real 1", workers=8, count=400)
    assert drawn == draws("0 real 1", workers=8, count=400)
    assert drawn[:5] == draws("0 real 1", workers=8, count=5), "a shorter run has the same first losses"
    assert drawn != draws("0 real 2", workers=8, count=400)
    assert {draw.worker for draw in drawn} == set(range(8))
    assert {int(10 * draw.moment) for draw in drawn} == set(range(10))


def test_steps_are_settled_once_enough_of_one_plan_of_all_workers_are_committed() -> None:
    rows = [
        {"time": at_s, "generation": generation, "workers": workers}
        for at_s, generation, workers in [(1, 1, 4), (2, 1, 4), (3, 2, 3), (5, 3, 4), (6, 3, 4), (8, 3, 4)]
    ]
    assert settled_step_s(rows, workers=4, settled=3) == 1.5
    assert settled_step_s(rows, workers=4, settled=4) is None, "of two plans"
    assert settled_step_s(rows, workers=5, settled=3) is None, "not all take part"
    assert settled_step_s(rows[:3], workers=4, settled=3) is None
    assert settled_step_s(rows[:2], workers=4, settled=3) is None, "too few"


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
        self._append(self.run.events_file, time=at_s, event="failure", **replace(record, **changes).to_json())

    def migration(self, *, generation: int, num_bytes: int) -> None:
        self._append(self.run.events_file, time=0.0, event="migration", generation=generation, bytes=num_bytes)

    def cost(self, *generations: int, steps: float, predicted: float | None) -> None:
        fields = {"failure_cost_steps": steps, "predicted_steps": predicted}
        self._append(
            self.run.events_file,
            time=0.0,
            event="failure_cost",
            incident_generations=generations,
            step=0,
            **fields,
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


def test_steps_of_another_plan_and_the_rest_of_a_step_are_not_compared_with(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.failure(at_s=109.4, step=5, generation=2)
    records.step(5, at_s=110.4, generation=2, step_s=0.9)
    for step in range(6, 11):
        records.step(step, at_s=110.4 + 4 * (step - 5), generation=3, step_s=4.0)
    records.failure(at_s=131.5, step=11, generation=4, is_salvaged=False, repeated_s=1.0)
    records.cost(4, steps=1.0, predicted=None)
    records.step(11, at_s=136.4, generation=4, step_s=4.0)
    _, cost = costs_of(records.run)
    assert (cost.step_s, cost.cost, cost.repeated) == pytest.approx((4.0, 0.5, 0.25))
    assert cost.prediction_error is None
    # The run takes its last ten steps, five of 2 s and five of 4 s: (136.4 - 130.4) / 3 - 1.
    assert cost.inconsistency == pytest.approx(0.0, abs=1e-9)


def test_a_record_that_is_not_as_defined_is_noticed(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.failure(at_s=109.4, step=5, generation=2)
    records.cost(2, steps=0.5, predicted=0.15)
    records.step(5, at_s=110.4, generation=2)
    (cost,) = costs_of(records.run)
    assert cost.inconsistency == pytest.approx(0.3)


def test_a_step_that_the_lost_worker_had_committed_counts_as_made(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.failure(at_s=110.2, step=5, generation=2, resume_step=6)
    records.step(6, at_s=112.8, generation=2)
    (cost,) = costs_of(records.run)
    assert cost.cost == pytest.approx(0.4)


def test_a_layout_is_the_partition_of_the_layers_whoever_computes_them() -> None:
    def layout(dp: int, pp: int, workers: Sequence[int]) -> object:
        return _layout(data_pipeline_plan(layer_costs=[1.0] * 8, dp=dp, pp=pp, micro_batches=8, workers=workers))

    assert layout(2, 2, range(4)) == layout(2, 2, [3, 1, 2, 0])
    assert layout(2, 2, range(4)) != layout(4, 1, range(4))


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


@pytest.mark.parametrize(("moving_s", "reached"), [(0.105, True), (0.115, False)])
def test_a_migration_stalls_little_longer_than_a_reroute(moving_s: float, reached: bool) -> None:
    part = "real-migration"
    found = [measured(part, "migration", 0.2, stall_s=moving_s), measured(part, "reroute", 0.2, stall_s=0.1)]
    (bar,) = bars(found)
    assert (bar.name, bar.reached) == ("real-migration, stall over that of reroute, medians", reached)


def test_repeated_steps_are_counted_and_not_left_out() -> None:
    on = measured("emulated", "salvage", 0.1, 0.2)
    mixed = replace(on, costs=(*on.costs, loss(cost=0.9, is_salvaged=False)))
    assert (mixed.not_salvaged, len(mixed.cost.values), mixed.cost.median) == (1, 3, 0.2)
    assert mixed.row()[-1] == "1"
    assert measured("emulated", "no salvage", 0.6).row()[-1] == "", "none is to be salvaged there"


def test_other_layouts_and_differences_from_the_records_are_told() -> None:
    losses = (loss(recorded=0.1), loss(recorded=None), loss(is_first_layout=False, recorded=0.17, inconsistency=0.02))
    found = Measured(part="emulated", setting="salvage", costs=losses)
    assert found.in_other_layouts == 1
    assert (found.difference, found.inconsistency) == pytest.approx((0.05, 0.02))


def test_the_90th_percentile_is_between_the_largest_values() -> None:
    assert measured("real", "salvage", *range(11)).large_cost == pytest.approx(9.0)
    assert measured("real", "salvage", 0.3).large_cost == 0.3


def test_what_is_written_is_read(tmp_path: Path) -> None:
    costs = (loss(), loss(recorded=None, predicted=None))
    write_costs(costs, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == costs


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


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    failure_cost._same_settings(settings(), tmp_path)
    failure_cost._same_settings(settings(), tmp_path)
    with pytest.raises(SystemExit, match=r"'seed': 0"):
        failure_cost._same_settings(settings(seed=1), tmp_path)
