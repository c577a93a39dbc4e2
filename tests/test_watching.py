"""A live run is watched and controlled by commands of other processes, and its page by a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Checkpoint, Parallel, config_to_toml
from chameleon_ft.observe import RunDirectory, complete_checkpoints
from tests.harness import Command, Ended, every_process_ends, small_config

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+{}\s"  # the line of a step


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A configuration of a run that goes on until it is ended, and writes no checkpoint before."""
    config = small_config(
        tmp_path, steps=100_000, workers=4, parallel=Parallel(dp=2, pp=2), checkpoint=Checkpoint(every=0)
    )
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config))
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def told(*arguments: str | Path) -> str:
    with Command(*arguments) as command:
        assert command.wait() == 0, command.printed
        return command.printed


def status(run: RunDirectory) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(told("status", run.path, "--json"))
    return values


def test_a_live_run_is_watched_saved_and_stopped(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with every_process_ends(training.session()):
            before = status(run)
            assert before["condition"] == "training"
            assert before["workers"] == {"live": [0, 1, 2, 3]}
            assert (before["checkpoint"], before["steps"]) == (None, 100_000)
            saved = re.search(r"training would resume with step (\d+)", told("checkpoint", run.path, "--wait"))
            assert saved is not None
            assert complete_checkpoints(run.checkpoints) == [int(saved[1])]
            assert int(saved[1]) > before["last"]["step"]
            assert "after this step with a checkpoint" in told("stop", run.path, "--wait")
            assert training.wait() == 130
    after = status(run)
    assert after["condition"] == "interrupted"
    assert (after["checkpoint"]["step"], after["checkpoint_damage"]) == (len(run.steps()), None)
    assert Ended(130, run).failures == []


def test_a_run_is_ended_at_once(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        told("stop", run.path, "--now", "--wait")
        assert training.wait() == 130
    assert complete_checkpoints(run.checkpoints) == []
