"""Real runs that workers come to while they run: they take part, and the losses are those of the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Batch, Checkpoint, FailurePhase, LlamaConfig, Parallel, Recovery, TrainConfig
from tests.harness import (
    Ended,
    assert_trained_as_if_nothing_failed,
    fails,
    small_config,
    train_here,
)

pytestmark = pytest.mark.multiprocess


def respawning(directory: Path, **changes: Any) -> TrainConfig:
    """Two pipelines of four stages, whose workers come back when they are lost."""
    fields: dict[str, Any] = {
        "workers": 8,
        "steps": 200,
        "parallel": Parallel(dp=2, pp=4),
        "batch": Batch(micro_batches=8, micro_batch_size=1),
        "model": LlamaConfig(dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=16),
        "recovery": Recovery(policy="chameleon", respawn=True, respawn_delay_s=0.0),
    }
    return small_config(directory, **{**fields, **changes})


def workers_of_last_plan(ended: Ended) -> set[int]:
    return {int(worker) for route in ended.plans()[-1]["routes"] for worker, *_ in route}


def test_a_lost_worker_comes_back(tmp_path: Path) -> None:
    ended = train_here(respawning(tmp_path, failures=(fails(3, step=4),)), tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    (respawn,) = ended.events("respawn")
    assert (respawn["worker"], respawn["life"]) == (3, 2)
    assert [event["worker"] for event in ended.events("joined")] == [3]
    (join,) = ended.events("join")
    assert join["workers"] == [3]
    assert [event["trigger"] for event in ended.events("decision")] == ["loss", "join"]
    assert 3 in workers_of_last_plan(ended)
    assert ended.run.steps()[-1].workers == 8
