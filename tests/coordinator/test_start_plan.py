"""The plan that a run is told to start with: read from either form, and refused where the run cannot follow it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.storage.plans import read_start_plan
from tests.golden import refused


def plan(micro_batches: int = 4) -> Plan:
    return data_pipeline_plan(layer_costs=[1.0] * 3, dp=2, pp=2, micro_batches=micro_batches)


def config(file: Path | None, **changes: object) -> RunConfig:
    fields = {"workers": 4, "parallel": Parallel(dp=2, pp=2), "batch": Batch(micro_batches=4), "plan": file}
    return RunConfig(**{**fields, **changes})  # type: ignore[arg-type]


def test_no_plan_is_none() -> None:
    assert read_start_plan(config(None)) is None


def test_a_plan_may_stand_alone_or_among_what_the_command_prints(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan().to_json())
    assert read_start_plan(config(file)) == plan()
    file.write_text(json.dumps({"step_s": 1.0, "plan": json.loads(plan().to_json())}))
    assert read_start_plan(config(file)) == plan()


def test_with_a_plan_the_layout_of_equal_pipelines_does_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan(micro_batches=6).to_json())
    assert read_start_plan(config(file, workers=7, batch=Batch(micro_batches=6))) == plan(6)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (None, {}),
        ("no json", {}),
        ("{}", {}),
        (plan(6).to_json(), {}),
        (json.dumps({"micro_batch_size": 4, "plan": json.loads(plan().to_json())}), {}),
        (plan().to_json(), {"workers": 3}),
    ],
)
def test_what_cannot_be_followed_is_refused(text: str | None, changes: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)
    with refused(ConfigError) as caught:
        read_start_plan(config(file, **changes))
    assert str(file) in str(caught.value)
