"""Coordinators that are killed in the middle of a run, and replaced."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from chameleon_ft.config import Batch, Control, Parallel
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import (
    Command,
    Ended,
    assert_as_the_plain_loop,
    every_process_ends,
    small_config,
)

pytestmark = pytest.mark.multiprocess

STEPS = 60


def killed(run: RunDirectory) -> None:
    """Kill the coordinator."""
    os.kill(run.read_control().pid, signal.SIGKILL)


def written(directory: Path, **changes: Any) -> Path:
    """Write the configuration of a run of four workers, with `changes`, and return its file."""
    layout = {"workers": 4, "parallel": Parallel(dp=2, pp=2), "batch": Batch(micro_batches=8, micro_batch_size=4)}
    return write_config(small_config(directory, **{"steps": STEPS, **layout, **changes}), directory)


def kill_a_rank(processes: Sequence[psutil.Process]) -> None:
    """Kill the newest rank among the processes; they tell by their names what they are."""
    ranks = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.name().startswith("worker "):
                ranks.append(each)
    ranks[-1].kill()


def assert_complete(ended: Ended) -> None:
    """Check that every step has one line, with the plain loop's loss."""
    assert ended.steps == list(range(STEPS)), "no line is missing, none is there twice"
    assert_as_the_plain_loop(ended, steps=STEPS)


@pytest.mark.parametrize("loses_a_worker", [False, True])
def test_a_run_goes_on_with_another_coordinator(tmp_path: Path, loses_a_worker: bool) -> None:
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as stack:
        first = stack.enter_context(Command("coordinator", written(tmp_path), "--output-dir", run.path))
        first.read_until("waiting for 4 workers")
        agent = stack.enter_context(Command("agent", "--run", run.path, "--workers", "4"))
        first.read_until(r"^\s+5\s")
        processes: list[psutil.Process] = agent.session()
        with every_process_ends(processes):
            killed(run)
            first.wait()
            if loses_a_worker:
                kill_a_rank(processes)
            second = stack.enter_context(Command("coordinator", "--take-over", run.path))
            assert second.wait() == 0, second.printed
            assert agent.wait() == 0, agent.printed
    ended = Ended(0, run)
    assert_complete(ended)
    assert len(ended.events("took_over")) == 1
    assert len(ended.failures) == loses_a_worker
    if not loses_a_worker:
        assert {step.generation for step in run.steps()} == {1}, "no worker stops for it"


@pytest.mark.parametrize("loses_a_worker", [False, True])
def test_the_launcher_replaces_a_coordinator(tmp_path: Path, loses_a_worker: bool) -> None:
    run = RunDirectory(tmp_path / "run")
    with Command("train", written(tmp_path), "--output-dir", run.path) as training:
        training.read_until(r"^\s+3\s")
        processes = training.session()
        with every_process_ends([each for each in processes if each.pid != run.read_control().pid]):
            killed(run)
            if loses_a_worker:
                kill_a_rank(processes)
            training.read_until("the coordinator was ended by SIGKILL; another one continues the run")
            training.read_until("took_over")
            training.read_until(r"^\s+\d+\s")
            killed(run)
            assert training.wait() == 0, training.printed
    ended = Ended(0, run)
    assert_complete(ended)
    assert len(ended.events("took_over")) == 2
    assert len(ended.failures) == loses_a_worker
    assert f"{STEPS} of {STEPS}" in training.printed
    assert "Traceback" not in training.printed
    assert "leaked" not in training.printed


def test_an_interrupt_while_there_is_no_coordinator_is_not_lost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with Command("train", written(tmp_path, steps=100_000), "--output-dir", run.path) as training:
        training.read_until(r"^\s+3\s")
        with every_process_ends(training.session()):
            killed(run)
            training.interrupt_all()
            assert training.wait() == 130, training.printed
    assert complete_checkpoints(run.checkpoints) == [len(run.steps())]


def test_the_launcher_replaces_a_coordinator_that_does_not_answer(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    config = written(tmp_path, steps=100_000, control=Control(lease_s=3.0), failures=unhurried(4))
    with Command("train", config, "--output-dir", run.path) as training:
        training.read_until(r"^\s+3\s")
        with every_process_ends(training.session()):
            os.kill(run.read_control().pid, signal.SIGSTOP)
            training.read_until(r"was ended by SIGKILL, because it did not answer for \d\.\d s; another one continues")
            training.read_until("took_over")
            training.read_until(r"^\s+\d+\s")
            training.signal(signal.SIGINT)
            assert training.wait() == 130, training.printed
    ended = Ended(130, run)
    assert ended.steps == list(range(len(ended.steps)))
    assert_as_the_plain_loop(ended, steps=60)
    assert ended.failures == []
