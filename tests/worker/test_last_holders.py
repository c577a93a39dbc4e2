"""Real runs in which the last holder of a layer is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Checkpoint, Parallel
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.timelines import read_recorded_steps
from tests.harness import (
    Ended,
    assert_as_the_plain_loop,
    assert_trained_as_if_nothing_failed,
    fails,
    resume_here,
    small_config,
    train_here,
)
from tests.worker.failures import the_failure

pytestmark = pytest.mark.multiprocess


def test_without_a_last_holder_training_returns_to_the_newest_checkpoint(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=6, micro_batch_size=1),
        checkpoint=Checkpoint(every=3),
        failures=(fails(1, step=7), fails(3, step=8, phase="sync")),
    )
    ended = train_here(config, tmp_path / "run")
    back_at = the_fall_back(ended).resume_step
    assert back_at in (3, 6), "checkpoint 6 may not be complete yet when step 8 is interrupted"
    assert_trained_as_if_nothing_failed(ended, repeated_steps=8 - back_at)
    assert ended.steps == [*range(8), *range(back_at, 10)]
    assert the_fall_back(ended).lost_layers == (2, 3)
    assert f"back to the checkpoint of step {back_at}" in the_fall_back(ended).action
    # Workers 0 and 2 are left; both held stage 0.
    assert [len(route) for route in ended.plans()[-1]["routes"]] == [2] * 6


def the_fall_back(ended: Ended) -> FailureRecord:
    (failure,) = [failure for failure in ended.failures if failure.policy == "checkpoint"]
    return failure


def test_a_loss_while_the_checkpoint_is_read(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        checkpoint=Checkpoint(every=3, keep=1),
        failures=(
            fails(1, step=7),
            fails(3, step=7),
            fails(5, step=7),  # the last holder of stage 1
            fails(2, step=3, phase="recovery"),
        ),
    )
    ended = train_here(config, tmp_path / "run")
    back_at = ended.failures[-1].resume_step
    assert back_at in (3, 6)
    assert_trained_as_if_nothing_failed(ended, repeated_steps=7 - back_at)
    assert ended.lost == {1, 2, 3, 5}


def test_without_a_checkpoint_the_run_ends_and_says_why(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=2,
        parallel=Parallel(dp=1, pp=2),
        failures=(fails(1, step=4),),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 1
    assert ended.summary["status"] == "failed"
    assert ended.summary["reason"].startswith("no live worker holds layers 2-3;")
    assert "set checkpoint.every" in ended.summary["reason"]
    assert (the_failure(ended).worker, the_failure(ended).policy) == (1, "stop")
    assert ended.steps == [0, 1, 2, 3]
    assert_as_the_plain_loop(ended)
    assert not ended.run.control_file.exists()
    recorded = [each for each in read_recorded_steps(ended.run.timelines) if each.part == "interrupted"]
    assert [(each.worker, each.step) for each in recorded] == [(0, 4)], "although no other step follows it"


def test_a_failed_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    # All workers are lost, so that even a checkpoint does not help; what is on disk does.
    config = small_config(
        tmp_path,
        workers=2,
        steps=30,
        parallel=Parallel(dp=1, pp=2),
        # Far enough apart for a disk that is slow.
        checkpoint=Checkpoint(every=8),
        failures=(fails(0, step=27), fails(1, step=27)),
    )
    failed = train_here(config, tmp_path / "run")
    assert (failed.code, failed.summary["status"]) == (1, "failed")
    newest = complete_checkpoints(failed.run.checkpoints)[-1]
    resumed = resume_here(failed, workers=3, parallel=Parallel(dp=3, pp=1))
    assert_trained_as_if_nothing_failed(resumed, repeated_steps=27 - newest)
    assert resumed.steps == [*range(27), *range(newest, 30)]
