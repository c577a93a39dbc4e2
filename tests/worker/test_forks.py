"""Forked runs: another batch and optimizer from the state of a run, in a new directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Batch, Checkpoint, Health, Parallel, RunConfig, TrainConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.launch.local import train
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.start import prepare_run
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.verify.verification import Verification, repeat_run
from tests.harness import TOLERANCE, Ended, small_config, train_here


def parent(tmp_path: Path, **changes: Any) -> Ended:
    config = small_config(
        tmp_path,
        steps=6,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        **changes,
    )
    return train_here(config, tmp_path / "parent")


def fork(source: RunDirectory, out: Path, **flags: Any) -> Ended:
    prepared = prepare_run(RunRequest(changes={"output_dir": out, **flags}, resume=str(source.path), fork=True))
    return Ended(prepared.start(train), prepared.directory)


def verified(ended: Ended) -> int:
    verification = Verification.of(repeat_run(ended.run), tolerance=TOLERANCE)
    assert verification.first_step_outside is None, str(verification)
    return verification.steps


@pytest.mark.multiprocess
def test_forks_of_forks_have_another_batch_and_optimizer_and_no_sample_twice(tmp_path: Path) -> None:
    ended = parent(tmp_path)
    before = sorted(path for path in ended.run.path.rglob("*"))
    first = fork(
        ended.run,
        tmp_path / "first",
        steps=10,
        batch={"micro_batches": 6},
        optimizer={"lr": 2e-3},
        checkpoint={"every": 1, "keep": 1},
    )
    assert first.code == 0
    assert first.steps == [6, 7, 8, 9]
    summary = first.summary
    assert (summary["steps"], summary["samples_seen"], summary["samples_lost"]) == (4, 4 * 12, 0)
    assert complete_checkpoints(first.run.checkpoints)[0] == 6, "the state that it was forked from stays"
    assert verified(first) == 4
    second = fork(first.run, tmp_path / "second", steps=12, batch={"micro_batch_size": 1})
    assert second.code == 0
    assert verified(second) == 2
    config = second.run.config()
    assert (config.forked.step, config.forked.samples) == (10, 6 * 8 + 4 * 12)
    assert config.first_sample(12) == 6 * 8 + 4 * 12 + 2 * 6
    assert sorted(path for path in ended.run.path.rglob("*")) == before, "the run itself is left alone"


@pytest.mark.multiprocess
def test_a_fork_resumes_and_goes_on_with_its_samples(tmp_path: Path) -> None:
    ended = fork(parent(tmp_path).run, tmp_path / "fork", steps=9, batch={"micro_batches": 2})
    assert ended.code == 0
    prepared = prepare_run(RunRequest(changes={"steps": 12}, resume=str(ended.run.path)))
    assert prepared.start(train) == 0
    assert [row.step for row in ended.run.steps()] == list(range(6, 12))
    # The rate depends on the number of steps, and verify knows both.
    assert verified(ended) == 6


def test_the_samples_of_a_fork_follow_those_before() -> None:
    order = SampleOrder(50, 3)
    old, new = Batch(micro_batches=4, micro_batch_size=2), Batch(micro_batches=3, micro_batch_size=1)
    before = [sample for step in range(5) for sample in order.ids(step, old.samples)]
    config = RunConfig.model_validate(
        {
            "batch": new.model_dump(),
            "parallel": {"dp": 1, "pp": 4},
            "forked": {"run": "a run", "step": 5, "samples": 40},
        }
    )
    after = [sample for step in range(5, 9) for sample in order.ids_at(config.first_sample(step), new.samples)]
    assert before + after == order.ids_at(0, 52)
    assert sorted((before + after)[:50]) == list(range(50)), "each sample once in the first epoch"


@pytest.mark.multiprocess
def test_what_a_fork_may_not_change_and_what_it_needs(tmp_path: Path) -> None:
    source = parent(tmp_path, checkpoint=Checkpoint(every=0), health=Health(detect_slow=False, check_every=0)).run
    out = tmp_path / "fork"
    for flags, refused in (
        ({"model": {"dim": 64}}, "its checkpoint was written with model.dim = 32, not 64; keep model unchanged"),
        ({"seed": 4}, "its checkpoint was written with seed = 3, not 4"),
        ({"precision": "bf16"}, "its checkpoint was written with precision = fp32, not bf16; keep precision unchanged"),
        ({}, "all of its 6 steps are done; give a larger --steps"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=refused):
            prepare_run(
                RunRequest(changes={"output_dir": out, "steps": 6, **flags}, resume=str(source.path), fork=True)
            )
        assert not out.exists()
    with pytest.raises(ConfigError, match="write --resume RUN --fork --output-dir DIRECTORY"):
        prepare_run(RunRequest(changes={"steps": 9}, resume=str(source.path), fork=True))
    with pytest.raises(ConfigError, match="write --resume RUN --fork --output-dir DIRECTORY"):
        prepare_run(RunRequest(changes={"output_dir": out}, resume=None, fork=True))
    with pytest.raises(CheckpointError, match="or continue from its state in a new directory by --fork --output-dir"):
        prepare_run(
            RunRequest(changes={"steps": 9, "optimizer": {"lr": 1e-4, "min_lr": 1e-5}}, resume=str(source.path))
        )
    assert isinstance(source.config(), TrainConfig)
