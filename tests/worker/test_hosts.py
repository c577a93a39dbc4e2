"""Real runs on emulated hosts that fail as a whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chameleon_ft.cluster import Link
from chameleon_ft.config import Emulation, Recovery
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.storage.profiles import read_profile, write_profile
from chameleon_ft.transfer import remap_plan
from tests.harness import assert_trained_as_if_nothing_failed, fails, train_here
from tests.worker.emulated import emulated_config


@pytest.mark.multiprocess
def test_no_host_is_left_with_all_holders_of_a_layer_and_then_one_is_lost(tmp_path: Path) -> None:
    # The stages of two pipelines begin on a host each, where gradients are reduced; links between hosts are slow.
    plan = data_pipeline_plan(layer_costs=[1.0] * 5, dp=2, pp=2, micro_batches=8)
    by_stage = remap_plan(plan, {0: 0, 2: 1, 1: 2, 3: 3})
    file = tmp_path / "plan.json"
    file.write_text(by_stage.to_json())
    config = emulated_config(
        tmp_path,
        workers=6,
        steps=60,
        plan=file,
        recovery=Recovery(host_failure_fraction=0.5),
        emulation=Emulation(workers_per_host=2),
        # One worker first, so that something is decided; once that has happened, all of the second host at once.
        failures=(fails(1, step=3), *(fails(worker, step=50) for worker in (2, 3))),
    )
    profile = read_profile(config.profile or tmp_path)
    write_profile(dataclasses.replace(profile, inter_host=Link(1e-4, 1e9)), config.profile or tmp_path)

    ended = train_here(config, tmp_path / "run")

    assert_trained_as_if_nothing_failed(ended)
    _, review, *later = ended.events("decision")
    assert review["trigger"] == "review"
    (chosen,) = (each for each in review["candidates"] if each["policy"] == review["chosen"])
    assert chosen["host_single_points_of_failure"] == 0
    assert any(each["host_single_points_of_failure"] for each in review["candidates"] if each["feasible"])
    assert later[0]["rate"]["failures"] == 2, "a host is one failure"
    assert later[0]["rate"]["host_failure_fraction"] == (0.5 + 1) / (1 + 2)
    assert {failure.worker for failure in ended.failures} == {1, 2, 3}
