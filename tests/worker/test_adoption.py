"""Agents that are killed: their ranks train on, and another agent adopts them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from chameleon_ft.config import Batch, Parallel, Recovery
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import Command, Ended, assert_as_the_plain_loop, every_process_ends, small_config

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+{}\s"  # the line of a step


def endless(directory: Path, *, steps: int = 100_000) -> Path:
    """Write the configuration of a run of two workers that trains until it is ended; lost workers come back."""
    config = small_config(
        directory,
        workers=2,
        steps=steps,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=1),
        recovery=Recovery(policy="reroute", respawn=True, respawn_delay_s=0.0),
        failures=unhurried(2),
    )
    return write_config(config, directory)


def read_steps(command: Command, number: int = 3) -> None:
    """Read the lines of some steps that follow."""
    for _ in range(number):
        command.read_until(STEP.format(r"\d+"))


def kill_agent(agent: psutil.Process) -> list[psutil.Process]:
    """Kill an agent; return its fork server, which ends with it, and its ranks, which do not."""
    server, *ranks = sorted(agent.children(), key=psutil.Process.create_time)
    with every_process_ends([agent, server]):
        agent.kill()
    assert all(rank.is_running() for rank in ranks)
    return ranks


def lose_one(run: RunDirectory, command: Command, ranks: Sequence[psutil.Process]) -> None:
    """Have the adopted worker 1 killed, and wait until another process has its place."""
    with Command("inject", run.path, "--worker", "1") as injecting:
        assert injecting.wait() == 0, injecting.printed
    command.read_until("worker 1 is restarted as incarnation 2")
    command.read_until("worker 1 has joined")
    read_steps(command)
    assert sum(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks) == 1


def assert_one_loss(ended: Ended) -> None:
    """Check that the killed agent cost nothing, and that only the worker was lost that was killed later."""
    lost = [failure.worker for failure in ended.failures]
    # The coordinator of a killed launcher may see its workers end before it ends itself.
    assert lost == [1] if ended.code >= 0 else lost[:1] == [1]
    assert [event["adopted"] for event in ended.events("host_joined")] == [[0, 1]]
    assert ended.steps == list(range(len(ended.steps)))
    assert_as_the_plain_loop(ended, steps=60)


def test_another_agent_adopts_the_ranks_of_one_that_was_killed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with Command("coordinator", endless(tmp_path), "--output-dir", run.path) as coordinator:
        coordinator.read_until("waiting for 2 workers")
        with Command("agent", "--run", run.path, "--workers", "2") as first:
            coordinator.read_until(STEP.format(3))
            ranks = kill_agent(psutil.Process(first.pid))
            coordinator.read_until("workers 0, 1 keep running, and another agent there adopts them")
            read_steps(coordinator)
            with Command("agent", "--run", run.path, "--workers", "2") as second:
                coordinator.read_until("adopts workers 0, 1")
                lose_one(run, coordinator, ranks)
                with every_process_ends([*ranks, *second.session()]):
                    coordinator.signal(signal.SIGINT)
                    assert coordinator.wait() == 130, coordinator.printed
                    assert second.wait() == 0, second.printed
    assert_one_loss(Ended(130, run))


@pytest.mark.parametrize("last", [signal.SIGINT, signal.SIGKILL])
def test_the_launcher_replaces_a_killed_agent(tmp_path: Path, last: signal.Signals) -> None:
    run = RunDirectory(tmp_path / "run")
    with Command("train", endless(tmp_path), "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        coordinator = run.read_control().pid
        (agent,) = (each for each in psutil.Process(training.pid).children() if each.pid != coordinator)
        ranks = kill_agent(agent)
        training.read_until("the agent of this machine was ended by SIGKILL; another one adopts its workers")
        training.read_until("adopts workers 0, 1")
        lose_one(run, training, ranks)
        assert [failure.worker for failure in Ended(0, run).failures] == [1]
        with every_process_ends([*ranks, *training.session()]):
            training.signal(last)
            assert training.wait() == (130 if last == signal.SIGINT else -last), training.printed
    assert_one_loss(Ended(130 if last == signal.SIGINT else -last, run))
