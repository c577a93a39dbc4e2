"""Signals to a launcher, and its output."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from chameleon_ft.config import RunConfig
from chameleon_ft.host.fork_server import SAME_SIGNAL_S
from chameleon_ft.launch import local
from chameleon_ft.launch import local as local_processes
from chameleon_ft.launch.local import STANDS_BY
from chameleon_ft.launch.processes import FORK, signals_not_lost, signals_passed_to, unattended
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.storage.files import ControlAddress, RunDirectory


@pytest.mark.parametrize("is_swallowed", [True, False])
def test_ctrl_c_counts_although_a_compiler_swallows_it(*, is_swallowed: bool) -> None:
    reached: list[str] = []

    def compiled() -> None:
        with signals_not_lost():
            with contextlib.suppress(KeyboardInterrupt) if is_swallowed else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        compiled()
    assert (len(reached), signal.getsignal(signal.SIGINT)) == (is_swallowed, before)


def launcher_of(run: Path, agent: MagicMock) -> local._Launcher:
    start = SimpleNamespace(run=RunDirectory(run), config=SimpleNamespace(control=SimpleNamespace(lease_s=3.0)))
    return local._Launcher(start, MagicMock(), MagicMock(), MagicMock(), agent)  # type: ignore[arg-type]


def test_ctrl_c_while_a_coordinator_is_replaced_ends_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[MagicMock] = []

    def start_child(_: object) -> MagicMock:
        if started:
            signal.raise_signal(signal.SIGINT)
        started.append(MagicMock())
        return started[-1]

    monkeypatch.setattr(local, "ForkedProcess", start_child)
    launcher = launcher_of(tmp_path, MagicMock())
    with unattended(), signals_passed_to(launcher._pass_on):
        launcher._start_coordinator()
        launcher._start_coordinator(stands_by=True)
    replaced, standing_by = started
    replaced.process.kill.assert_not_called()
    standing_by.process.kill.assert_called_once()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ends", ["its workers have left", "another signal"])
def test_sigterm_drains_the_workers_of_a_launcher_whose_coordinator_stands_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, ends: str
) -> None:
    agent, coordinator = MagicMock(), MagicMock()
    monkeypatch.setattr(local, "ForkedProcess", lambda _: coordinator)
    launcher = launcher_of(tmp_path, agent)
    with unattended(), signals_passed_to(launcher._pass_on):
        launcher._start_coordinator(stands_by=True)
        for _ in range(2):  # within a second, they are one
            signal.raise_signal(number)
        agent.pipe.send.assert_called_once_with(number)
        coordinator.pipe.send.assert_called_with(number)
        coordinator.process.kill.assert_not_called()
        if ends == "another signal":
            launcher._signalled_s = [at_s - 2 * SAME_SIGNAL_S for at_s in launcher._signalled_s]
            signal.raise_signal(number)
        else:
            agent.process.is_alive.return_value = False
            launcher._give_up_if_unheard()
        coordinator.process.kill.assert_called_once()


def test_a_coordinator_says_that_another_one_leads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (coordinator, coordinators), (agent, agents) = FORK.Pipe(), FORK.Pipe()
    with coordinator, coordinators, agent, agents:
        launcher = launcher_of(tmp_path, MagicMock(pipe=agent))
        launcher._coordinator = MagicMock(pipe=coordinator)
        launcher._signals, launcher._signalled_s = [signal.SIGTERM], [time.monotonic()]
        coordinators.send(STANDS_BY)
        coordinators.send("finished")
        assert launcher._watch() == "finished"
        assert agents.recv() == signal.SIGTERM, "its workers are drained"
    assert capsys.readouterr().out == "another coordinator leads the run; one stands by here\n"


class ToldAgent:
    """Serves until it is drained, which its launcher tells it at once."""

    def __init__(self, launcher: Connection, number: signal.Signals, *, is_connected: bool) -> None:
        self._launcher = launcher
        self._number = number
        self._is_connected = is_connected
        self.did: list[str] = []

    async def serve(self) -> None:
        self._left = asyncio.Event()
        self._launcher.send(self._number)
        await self._left.wait()
        self.did.append("left")

    def drain(self, number: signal.Signals) -> bool:
        self.did.append(f"drain at {number.name}")
        self._left.set()
        return self._is_connected

    def kill_all(self) -> None:
        self.did.append("ended")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("is_connected", "did"), [(True, ["left", "ended"]), (False, ["ended"])])
def test_an_agent_leaves_at_the_signal_of_its_launcher(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, did: list[str], *, is_connected: bool
) -> None:
    ours, theirs = FORK.Pipe()
    agent, accesses = ToldAgent(ours, number, is_connected=is_connected), []

    def create_agent(access: CoordinatorAccess, **_: object) -> ToldAgent:
        accesses.append(access)
        return agent

    monkeypatch.setattr(local_processes, "create_agent", create_agent)
    config, control = RunConfig(), ControlAddress(address="127.0.0.1:1", token="token", pid=1)
    with ours, theirs, socket.socket() as listener:
        local_processes.run_next_agent(config, control, listener, MagicMock(), theirs)
    assert agent.did == [f"drain at {number.name}", *did]
    (access,) = accesses
    assert access.patience_s == config.timeouts.reconnect_s, "its coordinator may be being replaced, too"


def test_signals_after_the_end_are_ignored_until_all_is_closed() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with unattended():
        with signals_passed_to(lambda _: None):
            pass
        signal.raise_signal(signal.SIGTERM)  # which would end this process
    assert signal.signal(signal.SIGTERM, before) == signal.SIG_DFL


def test_output_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with unattended():
            print("a line", flush=True)
        assert sys.stdout is full
