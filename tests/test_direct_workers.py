"""Workers that a launcher of its own starts, without an agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chameleon_ft.config import Batch, Parallel, Timeouts
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
STEP = r"^\s+{}\s"  # the line of a step


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def coordinator(tmp_path: Path, run: RunDirectory) -> Iterator[Command]:
    config = small_config(
        tmp_path,
        steps=100_000,
        workers=3,
        parallel=Parallel(dp=3, pp=1),
        batch=Batch(micro_batches=6),
        timeouts=Timeouts(reconnect_s=2.0),
        failures=unhurried(3),
    )
    with Command("coordinator", write_config(config, tmp_path), "--output-dir", run.path) as command:
        yield command


def test_workers_started_directly(coordinator: Command, run: RunDirectory) -> None:
    found = coordinator.read_until(r"CHAMELEON_TOKEN=(\S+) chameleon agent --coordinator (\S+)")
    environ = {"WORLD_SIZE": "3", "CHAMELEON_TOKEN": run.read_control().token}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                Command(
                    "worker", "--coordinator", found[2], environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
            )
            for rank in range(3)
        ]
        coordinator.read_until(STEP.format(3))
        os.kill(workers[1].pid, signal.SIGKILL)
        lost_in = int(coordinator.read_until(r"worker 1 lost in step (\d+)")[1])
        coordinator.read_until(STEP.format(lost_in + 2))
        again = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}
        with Command("worker", "--run", run.path, environ=again, own_interpreter=True) as late:
            coordinator.read_until("worker 1 has joined as a spare")
            with Command("worker", "--run", run.path, environ=again) as second:
                assert second.wait() == 1
                assert "worker 1 is refused: worker 1 has joined already" in second.printed
            with Command("agent", "--run", run.path, "--workers", "1") as host:
                coordinator.read_until("worker 3 has joined as a spare")
                coordinator.signal(signal.SIGINT)
                assert coordinator.wait() == 130
                assert host.wait() == 0, host.printed
            assert late.wait() == 0, late.printed
        assert [worker.wait() for worker in workers] == [0, -signal.SIGKILL, 0]
    ended = Ended(130, run)
    assert ended.lost == {1}
    assert ended.failures[0].noticed_by in ("connection", "peer")
    assert_as_the_plain_loop(ended, steps=60)


def test_sigterm_drains_workers_started_directly(coordinator: Command, run: RunDirectory) -> None:
    coordinator.read_until("waiting for 3 workers")
    with ExitStack() as stack:
        first, *others = [
            stack.enter_context(
                Command("worker", "--run", run.path, environ={"RANK": rank, "WORLD_SIZE": "3", "LOCAL_RANK": rank})
            )
            for rank in "012"
        ]
        coordinator.read_until(STEP.format(3))
        for worker in others:
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0, worker.printed
        first.signal(signal.SIGTERM)
        assert first.wait() == coordinator.wait() == os.EX_TEMPFAIL
    ended = Ended(os.EX_TEMPFAIL, run)
    assert {event["worker"] for event in ended.events("drained")} == {1, 2}
    assert ended.lost == set()
    assert complete_checkpoints(run.checkpoints) == [len(run.steps())]
    assert_as_the_plain_loop(ended, steps=60)


def test_workers_end_with_a_coordinator_that_is_killed(coordinator: Command, run: RunDirectory) -> None:
    found = coordinator.read_until(r"CHAMELEON_TOKEN=(\S+) chameleon agent --coordinator (\S+)")
    environ = {"CHAMELEON_TOKEN": run.read_control().token}
    with Command("agent", "--coordinator", found[2], "--workers", "3", environ=environ) as host:
        coordinator.read_until(STEP.format(1))
        with every_process_ends([*coordinator.session(), *host.session()]):
            coordinator.signal(signal.SIGKILL)
            assert coordinator.wait() == -signal.SIGKILL
            assert host.wait() == 1
        assert "the connection to the coordinator is lost" in host.printed
