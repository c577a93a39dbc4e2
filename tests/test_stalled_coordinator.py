"""A coordinator that does not run for a while, in a real run."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from chameleon_ft.storage.files import RunDirectory
from tests.harness import Command, Ended

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[1]
LEASE_S = 4
STALL_S = 6.5  # longer than the lease, for which workers wait for an answer before they connect again
STEPS = 18


def test_workers_train_on_and_none_is_lost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    example, _, _ = (ROOT / "examples" / "emulated.toml").read_text().partition("[[failures]]")
    config = tmp_path / "config.toml"
    config.write_text(example.replace('"profiles/', f'"{ROOT}/profiles/'))
    layout = ("--workers", 4, "--parallel.dp", 2, "--parallel.pp", 2, "--batch.micro-batches", 8)
    # A policy that looks for no other plan: so there is a second generation only if some worker has stopped.
    options = (*layout, "--control.lease-s", LEASE_S, "--recovery.policy", "reroute", "--steps", STEPS)
    with ExitStack() as stack:
        coordinator = stack.enter_context(Command("coordinator", config, *options, "--output-dir", run.path))
        coordinator.read_until("waiting for 4 workers")
        agent = stack.enter_context(Command("agent", "--run", run.path, "--workers", "4"))
        coordinator.read_until(r"^\s+3\s")
        pid = run.read_control().pid
        assert pid == coordinator.pid
        coordinator.signal(signal.SIGSTOP)
        threading.Event().wait(STALL_S)
        coordinator.signal(signal.SIGCONT)
        assert coordinator.wait() == 0, coordinator.printed
        assert agent.wait() == 0, agent.printed
    ended = Ended(0, run)
    assert ended.failures == []
    assert ended.steps == list(range(STEPS)), "no line is missing, none is there twice"
    assert {step.generation for step in run.steps()} == {1}, "no worker stopped"
    (event,) = ended.events("stalled")
    assert event["stall_s"] == pytest.approx(STALL_S, rel=0.4)
    assert not ended.events("refused")
