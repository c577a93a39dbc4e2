"""Bits that flip in the state of one holder of a layer: the next check notices, and training goes on without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Checkpoint, Health, LlamaConfig, Parallel, Recovery
from chameleon_ft.storage.checkpoints import complete_checkpoints
from tests.harness import assert_as_the_plain_loop, fails, small_config, train_here
from tests.histories import train_until

pytestmark = pytest.mark.multiprocess


@pytest.mark.each_kind
def test_of_three_holders_the_one_that_differs_is_lost(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        failures=(fails(2, step=5, phase="optimizer", kind="corrupt"),),
        health=Health(detect_slow=False, check_every=3),
        checkpoint=Checkpoint(every=0),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0
    (failure,) = ended.failures
    assert (failure.worker, failure.noticed_by) == (2, "checksum")
    assert failure.step == 6
    assert "differs from that of its peers" in failure.cause
    assert ended.steps == list(range(10))
    assert_as_the_plain_loop(ended, steps=6)


def test_of_two_holders_all_return_to_the_checkpoint_from_before(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        failures=(fails(1, step=5, phase="optimizer", kind="corrupt"),),
        health=Health(detect_slow=False, check_every=3),
        checkpoint=Checkpoint(every=1, keep=1),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0
    assert not ended.lost
    (event,) = ended.events("state_differs")
    assert (event["step"], event["agreed"]) == (6, 3)
    first = ended.steps[6]
    assert 1 <= first <= 3, "a checkpoint may have been left out, because the one before was still being written"
    assert ended.steps == [*range(6), *range(first, 10)]
    assert_as_the_plain_loop(ended)


def test_without_a_checkpoint_from_before_the_run_ends_and_names_layers_workers_and_step(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=2,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        failures=(fails(1, step=1, phase="optimizer", kind="corrupt"),),
        health=Health(detect_slow=False, check_every=2),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 1
    reason = ended.summary["reason"]
    assert "after 2 updates differs between workers 0, 1, and there is no checkpoint from before" in reason


def test_a_wrong_state_is_found_before_the_last_checkpoint_is_written(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=3,
        parallel=Parallel(dp=3, pp=1),
        failures=(fails(1, step=9, phase="optimizer", kind="corrupt"),),
        health=Health(detect_slow=False, check_every=1),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0
    (failure,) = ended.failures
    assert (failure.worker, failure.noticed_by) == (1, "checksum")
    assert "after 10 updates differs" in failure.cause
    assert ended.steps == list(range(10))
    assert complete_checkpoints(ended.run.checkpoints) == [10], "the others have written it"
    assert_as_the_plain_loop(ended)


def test_nothing_is_found_where_layers_move_steps_are_completed_and_parameters_are_tied(tmp_path: Path) -> None:
    model = LlamaConfig(
        dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32, dropout=0.1, tie_embeddings=True
    )
    config = small_config(
        tmp_path,
        steps=100_000,
        model=model,
        failures=(fails(2, step=3, phase="backward"), fails(5, step=12, phase="sync")),
        recovery=Recovery(policy="chameleon", respawn=True, respawn_delay_s=0.2),
        health=Health(detect_slow=False, check_every=1),
    )
    ended = train_until(config, tmp_path / "run", lambda ended: len(ended.lost) == 2 and ended.events("join"))
    assert ended.code == 130, ended.summary["reason"]
    assert not ended.events("state_differs")
    assert_as_the_plain_loop(ended)
