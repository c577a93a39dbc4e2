"""Coordinators that stand by, and take over from one that is lost, stopped or cut off."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from chameleon_ft.config import Batch, Control, Parallel, Recovery
from chameleon_ft.errors import ConfigError
from chameleon_ft.launch.coordinator import DEPOSED
from chameleon_ft.protocol.address import bearer
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import (
    PATIENT,
    Command,
    Ended,
    assert_as_the_plain_loop,
    every_process_ends,
    small_config,
)

pytestmark = pytest.mark.multiprocess

LEASE_S = 3.0


def written(directory: Path, **changes: Any) -> Path:
    """Write the configuration of a run of two workers, and return its file.

    Its steps are slow, so that it lasts until another coordinator leads, and their lines do not fill a pipe that is
    not read for long.
    """
    layout = {"workers": 2, "parallel": Parallel(dp=2, pp=1), "batch": Batch(micro_batches=4, micro_batch_size=2)}
    timeouts = PATIENT.model_copy(update={"reconnect_s": 20.0})
    fields = {"control": Control(lease_s=LEASE_S), "timeouts": timeouts, **layout, **changes}
    fields["failures"] = unhurried(fields["workers"])
    return write_config(small_config(directory, **fields), directory)


def assert_complete(ended: Ended, *, steps: int) -> None:
    """Check that every step has one line, with the plain loop's loss, and no worker was lost."""
    assert ended.steps == list(range(steps)), "no line is missing, none is there twice"
    assert_as_the_plain_loop(ended, steps=60)
    assert ended.failures == []
    assert {step.generation for step in ended.run.steps()} == {1}, "no worker stops for it"


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_continues_the_run(tmp_path: Path, kind: signal.Signals) -> None:
    run, steps = RunDirectory(tmp_path / "run"), 80
    with ExitStack() as stack:
        first = stack.enter_context(Command("coordinator", written(tmp_path, steps=steps), "--output-dir", run.path))
        first.read_until("waiting for 2 workers")
        standby = stack.enter_context(Command("coordinator", "--standby", run.path, "--host", "127.0.0.2"))
        standby.read_until("standing by at 127.0.0.2:")
        agent = stack.enter_context(Command("agent", "--run", run.path, "--workers", "2"))
        first.read_until(r"^\s+5\s")
        with every_process_ends([*agent.session(), *standby.session()]):
            first.signal(kind)
            standby.read_until(r"this one leads in term \d")  # one more for each stall of the machine
            if kind is signal.SIGSTOP:
                standby.read_until("took_over")
                first.signal(signal.SIGCONT)
                assert first.wait() == DEPOSED, first.printed
                assert re.search(r"leads the run; this one, of term \d, ends", first.printed)
            assert standby.wait() == 0, standby.printed
            assert agent.wait() == 0, agent.printed  # also if the run has ended before it was back
    assert_complete(Ended(0, run), steps=steps)
    assert len(Ended(0, run).events("took_over")) == 1
    assert not run.control_file.exists()


def test_a_coordinator_that_has_to_claim_the_next_term_loses_no_worker(tmp_path: Path) -> None:
    run, steps, lease_s = RunDirectory(tmp_path / "run"), 50, 1.0
    # For so long the standby counts as one that may lead, so that the leader lets its peers go.
    # The agent looks for another coordinator for the last of them: that one has ended without a word to it.
    timeouts = PATIENT.model_copy(update={"heartbeat_timeout_s": 40.0, "watchdog_min_s": 50.0, "reconnect_s": 10.0})
    config = written(tmp_path, steps=steps, control=Control(lease_s=lease_s), timeouts=timeouts)
    with ExitStack() as stack:
        leader = stack.enter_context(Command("coordinator", config, "--output-dir", run.path))
        leader.read_until("waiting for 2 workers")
        standby = stack.enter_context(Command("coordinator", "--standby", run.path))
        standby.read_until("standing by at 127.0.0.1:")
        standby.signal(signal.SIGSTOP)
        agent = stack.enter_context(Command("agent", "--run", run.path, "--workers", "2"))
        leader.read_until(r"^\s+5\s")
        away = run.terms.rename(tmp_path / "away")
        run.terms.write_text("in the way")
        while leads_now(run):
            time.sleep(0.01)
        run.terms.unlink()
        away.rename(run.terms)
        leader.read_until("it does in term 2")
        leader.read_until(rf"^\s+{steps - 10}\s")
        leader.signal(signal.SIGSTOP)  # meanwhile the workers finish
        time.sleep(2 * lease_s)
        leader.signal(signal.SIGCONT)
        assert leader.wait() == 0, leader.printed
        assert agent.wait() == 0, agent.printed
        standby.signal(signal.SIGCONT)
        assert standby.wait() == 0, standby.printed
    ended = Ended(0, run)
    assert_complete(ended, steps=steps)
    assert len(ended.events("reclaimed")) >= 2


def leads_now(run: RunDirectory) -> bool:
    """Ask the coordinator of a run whether it leads."""
    control = run.read_control()
    connection = HTTPConnection(control.address, timeout=30.0)
    connection.request("GET", "/", headers=bearer(control.token))
    with closing(connection):
        return connection.getresponse().status != HTTPStatus.SERVICE_UNAVAILABLE


def test_a_standby_ends_with_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with Command("train", written(tmp_path, steps=100_000), "--output-dir", run.path) as training:
        training.read_until(r"^\s+3\s")
        with Command("coordinator", "--standby", run.path) as standby:
            standby.read_until("standing by at 127.0.0.1:")
            os.kill(training.pid, signal.SIGINT)
            assert training.wait() == 130, training.printed
            assert standby.wait() == 130, standby.printed
        assert "the run is over: interrupted" in standby.printed
        assert "leads in term" not in standby.printed


def test_sigterm_to_a_coordinator_and_to_an_agent_whose_coordinator_leads_leaves_the_run_to_others(
    tmp_path: Path,
) -> None:
    run, layout = RunDirectory(tmp_path / "run"), {"workers": 4, "parallel": Parallel(dp=4, pp=1)}
    with ExitStack() as stack:
        config = written(tmp_path, steps=100_000, **layout)
        first = stack.enter_context(Command("coordinator", config, "--output-dir", run.path))
        first.read_until("waiting for 4 workers")
        agents = []
        for _ in range(2):
            agents.append(stack.enter_context(Command("agent", "--run", run.path, "--workers", "2", "--standby")))
            agents[-1].read_until("standing by at 127.0.0.1:")
        first.read_until(r"^\s+5\s")
        first.signal(signal.SIGTERM)
        assert first.wait() == DEPOSED, first.printed
        leader, other = agents if leads(run, agents[0]) else agents[::-1]
        with every_process_ends(leader.session()):
            leader.signal(signal.SIGTERM)
            other.read_until(r"this one leads in term \d")
            assert leader.wait() == 0, leader.printed
        other.read_until("took_over")
        other.read_until(r"^\s+\d+\s")
        with every_process_ends(other.session()):
            other.signal(signal.SIGTERM)
            assert other.wait() == os.EX_TEMPFAIL, other.printed
    ended = Ended(os.EX_TEMPFAIL, run)
    assert (ended.summary["status"], ended.failures) == ("terminated", [])
    assert len(ended.events("drained")) == 2
    assert ended.steps == list(range(len(ended.steps)))
    assert complete_checkpoints(run.checkpoints)[-1] == len(ended.steps)
    assert_as_the_plain_loop(ended, steps=60)


def leads(run: RunDirectory, agent: Command) -> bool:
    """Wait until a coordinator of an agent leads the run, and return whether that is the one of this agent."""
    while True:
        with suppress(ConfigError, psutil.Error):  # the address is being written, or still that of the lost one
            return bool(psutil.Process(run.read_control().pid).ppid() == agent.pid)
        time.sleep(0.01)


@contextmanager
def launched_and_replaced(directory: Path, **changes: Any) -> Iterator[tuple[Command, Command]]:
    """Train by a launcher whose coordinator stands by, while another one leads; yield both commands."""
    run = RunDirectory(directory / "run")
    config = written(directory, steps=100_000, **changes)
    with ExitStack() as stack:
        training = stack.enter_context(Command("train", config, "--output-dir", run.path))
        training.read_until(r"^\s+3\s")
        standby = stack.enter_context(Command("coordinator", "--standby", run.path))
        standby.read_until("standing by at 127.0.0.1:")
        steps = len(run.steps())
        while len(run.steps()) < steps + 2:  # by then, workers and agent have read of it
            time.sleep(0.01)
        training.signal(signal.SIGSTOP)  # it is to see too late that its coordinator is lost
        os.kill(run.read_control().pid, signal.SIGKILL)
        standby.read_until(r"this one leads in term \d")
        training.signal(signal.SIGCONT)
        training.read_until("the coordinator was ended by SIGKILL; another one continues the run")
        training.read_until("another coordinator leads the run; one stands by here")
        yield training, standby


def test_sigterm_drains_the_workers_of_a_launcher_whose_coordinator_stands_by(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    changes = {"recovery": Recovery(policy="chameleon"), "control": Control()}
    with (
        launched_and_replaced(tmp_path, **changes) as (training, standby),
        Command("agent", "--run", run.path, "--workers", "1") as agent,
    ):
        standby.read_until(r"worker 2 (has )?joined")
        with every_process_ends(training.session()):
            training.signal(signal.SIGTERM)
            assert training.wait() == os.EX_TEMPFAIL, training.printed
        assert "another coordinator leads the run; this machine and its workers leave it" in training.printed
        standby.read_until(r"^\s+\d+\s.*\s1$")
        standby.signal(signal.SIGTERM)
        assert standby.wait() == agent.wait() == os.EX_TEMPFAIL, standby.printed + agent.printed
    ended = Ended(os.EX_TEMPFAIL, run)
    assert (ended.summary["status"], ended.failures) == ("terminated", [])
    assert {event["worker"] for event in ended.events("drained")} == {0, 1}
