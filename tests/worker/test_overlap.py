"""Gradients that are reduced while the backward goes on, by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.config import Failure, Recovery
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.report.comparison import compare_generations
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.storage.timelines import read_recorded_steps
from tests.harness import assert_trained_as_if_nothing_failed, train_here
from tests.worker.emulated import emulated_config

pytestmark = pytest.mark.multiprocess

STAGES = [LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3), LayerRange(3, 5)]


def interleaved(*, micro_batches: int) -> Plan:
    """Three pipelines of two workers, each with two stages apart: the upper one's gradients are complete first."""
    chains = [tuple(Hop(2 * n + stage % 2, layers) for stage, layers in enumerate(STAGES)) for n in range(3)]
    placement = Placement(
        5,
        {
            worker: (STAGES[worker % 2], STAGES[worker % 2 + 2])
            for chain in range(3)
            for worker in (2 * chain, 2 * chain + 1)
        },
    )
    return Plan(placement, tuple(Route(number, chains[number % 3]) for number in range(micro_batches)))


def test_upper_stages_are_reduced_before_the_lower_ones_have_ended_and_kills_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(interleaved(micro_batches=6).to_json())
    failures = (Failure(step=3, worker=1, phase="backward"), Failure(step=5, worker=4, phase="sync"))
    config = emulated_config(tmp_path, workers=6, plan=file, failures=failures).model_copy(
        update={
            "batch": emulated_config(tmp_path).batch.model_copy(update={"micro_batches": 6}),
            "recovery": Recovery(policy="reroute"),
        }
    )

    ended = train_here(config, tmp_path / "run")

    assert_trained_as_if_nothing_failed(ended)
    assert [failure["worker"] for failure in ended.summary["failures"]] == [1, 4]
    plans = read_generation_plans(ended.run.plans)
    recorded = [step for step in read_recorded_steps(ended.run.timelines) if step.part == "whole"]
    for step in recorded:
        if step.generation == 1:
            first, last = step.reductions
            assert (first.start, last.start) == (step.worker % 2 + 2, step.worker % 2)
            assert first.start_s < last.start_s
            assert first.start_s < step.operations[-1][1]
            assert last.end_s <= step.vote_s[0]
    for comparison in compare_generations(plans, recorded):
        assert comparison.error < 1e-3, "the real system can only be slower than what it emulates"
