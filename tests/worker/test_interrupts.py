"""Real runs that are interrupted, and runs that are resumed with other workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chameleon_ft.config import Parallel
from chameleon_ft.storage.checkpoints import complete_checkpoints
from tests.harness import (
    ScriptedView,
    assert_as_the_plain_loop,
    assert_trained_as_if_nothing_failed,
    fails,
    resume_here,
    small_config,
    train_here,
)

pytestmark = pytest.mark.multiprocess


def test_a_run_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    first = train_here(small_config(tmp_path, steps=4), tmp_path / "run")
    assert complete_checkpoints(first.run.checkpoints) == [4]
    resumed = resume_here(first, steps=8, workers=2, parallel=Parallel(dp=1, pp=2))
    assert resumed.steps == list(range(8))
    again = resume_here(resumed, steps=12, workers=8, parallel=Parallel(dp=2, pp=4))
    assert_trained_as_if_nothing_failed(again)
    assert [record.workers for record in again.run.steps()] == [6] * 4 + [2] * 4 + [8] * 4
    assert [record.generation for record in again.run.steps()] == [1] * 4 + [2] * 4 + [3] * 4


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_in_an_outage_ends_the_run_after_it(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=200, failures=(fails(3, step=4),))
    view = ScriptedView(at_failure=interrupt)
    ended = train_here(config, tmp_path / "run", view=view)
    assert (ended.code, ended.lost) == (130, {3})
    assert complete_checkpoints(ended.run.checkpoints) == [len(ended.steps)]
    assert_as_the_plain_loop(ended)
