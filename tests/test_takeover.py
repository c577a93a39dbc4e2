"""Coordinators that are killed in the middle of a run, and replaced."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from chameleon_ft.config import Batch, Parallel, config_to_toml
from chameleon_ft.observe import RunDirectory
from tests.harness import Command, Ended, assert_as_the_plain_loop, every_process_ends, small_config

pytestmark = pytest.mark.multiprocess

STEPS = 60


def killed(run: RunDirectory) -> None:
    """Kill the coordinator."""
    os.kill(run.read_control().pid, signal.SIGKILL)


@pytest.mark.parametrize("loses_a_worker", [False, True])
def test_a_run_goes_on_with_another_coordinator(tmp_path: Path, loses_a_worker: bool) -> None:
    config = small_config(
        tmp_path,
        workers=4,
        steps=STEPS,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=8, micro_batch_size=4),
    )
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as stack:
        first = stack.enter_context(Command("coordinator", tmp_path / "config.toml", "--output-dir", run.path))
        first.read_until("waiting for 4 workers")
        agent = stack.enter_context(Command("agent", "--run", run.path, "--workers", "4"))
        first.read_until(r"^\s+5\s")
        processes: list[psutil.Process] = agent.session()
        with every_process_ends(processes):
            killed(run)
            first.wait()
            if loses_a_worker:
                processes[-1].kill()  # the newest process of its session is a rank
            second = stack.enter_context(Command("coordinator", "--take-over", run.path))
            assert second.wait() == 0, second.printed
            assert agent.wait() == 0, agent.printed
    ended = Ended(0, run)
    assert_as_the_plain_loop(ended, steps=STEPS)
    assert ended.steps == list(range(STEPS)), "no line is missing, none is there twice"
    assert len(ended.events("took_over")) == 1
    assert len(ended.failures) == loses_a_worker
    if not loses_a_worker:
        assert {step.generation for step in run.steps()} == {1}, "no worker stops for it"
