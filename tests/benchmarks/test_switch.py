"""What the benchmark of switches reads in the records of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from benchmarks.switch import switches_of
from chameleon_ft.events.records import StepRecord


@dataclass
class Row:
    step: int
    generation: int
    time: float


@dataclass
class Records:
    """The records of a run: steps of two seconds, three while layers move and one after the switch."""

    slow_step: int = -1

    def steps(self) -> list[Row]:
        rows, now = [], 0.0
        for step in range(40):
            generation = 1 if step < 15 else 2 if step < 18 else 3
            now += {1: 2.0, 2: 3.0, 3: 1.0}[generation] * (1.5 if step == self.slow_step else 1.0)
            rows.append(Row(step, generation, now))
        return rows

    def events(self) -> list[dict[str, Any]]:
        candidates = [{"policy": "stay", "migration_s": 0.0}, {"policy": "repartition", "migration_s": 4.0}]
        return [
            {"event": "plan", "generation": 1, "policy": "start"},
            {"event": "plan", "generation": 2, "policy": "migration"},
            {"event": "migration", "generation": 2, "step": 15},
            {"event": "plan", "generation": 3, "policy": "repartition"},
            {
                "event": "decision",
                "generation": 3,
                "trigger": "join",
                "chosen": "repartition",
                "candidates": candidates,
            },
            {"event": "join", "generation": 3, "stop_s": 0.0, "stall_s": 0.25, "resume_step": 18, "migrate_s": 5.0},
        ]


def found(records: Records) -> Any:
    (switch,) = switches_of(cast(list[StepRecord], records.steps()), records.events())
    return switch


def test_steps_are_compared_with_those_on_their_side_of_the_switch() -> None:
    switch = found(Records())
    assert (switch.trigger, switch.stall_s, switch.around) == ("join", 0.25, pytest.approx(1.0))
    assert switch.migrating == pytest.approx(1.5)
    assert switch.migration == pytest.approx(1.25)


@pytest.mark.parametrize("step", [6, 14, 17, 18, 27])
def test_a_long_step_on_either_side_counts(step: int) -> None:
    assert found(Records(slow_step=step)).around == pytest.approx(1.5)


def test_a_step_far_away_does_not_count() -> None:
    assert found(Records(slow_step=2)).around == found(Records(slow_step=30)).around == pytest.approx(1.0)
