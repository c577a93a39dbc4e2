"""Signals to the processes of a run at drawn moments, and faults of its disk and of the network between its hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks._live_run import Tail
from benchmarks._sequence_draws import Strike
from chameleon_ft.config import RunConfig, Timeouts, config_to_toml
from chameleon_ft.errors import ConfigError
from chameleon_ft.storage.files import FaultLog, RunDirectory
from tests.harness import Command
from tests.mounts import fill
from tests.network import ADDRESSES, Network, interface

_POLL_S: Final = 0.005
_STOPPED_S: Final = 2.0  # of a process that is stopped; longer than a recovery takes
_ENDED_S: Final = 30.0  # for processes that end with the run
_TERMINATED: Final = 75  # exit code of a run that is to be resumed
_CUT_OFF_S: Final = 8.0  # of a coordinator; longer than its heartbeats take
_MAX_CUT_S: Final = 40.0  # of a link, unless a worker is lost before
TIMEOUTS_ON_HOSTS: Final = Timeouts(
    heartbeat_timeout_s=2.0, watchdog_min_s=3.0, watchdog_factor=50.0, rendezvous_s=90.0, reconnect_s=60.0
)
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Struck:
    """A strike that has hit something, with its beginning and its end in Unix seconds."""

    strike: Strike
    began: float
    ended: float


def train_under_strikes(
    config: RunConfig, run: RunDirectory, directory: Path, strikes: tuple[Strike, ...]
) -> tuple[int, list[str], list[Struck]]:
    """Train a run by one command line, which is repeated while it ends as terminated.

    Returns:
        The exit code of the last command, a description of each process that was left behind, and what was hit.
    """
    file, struck = directory / "config.toml", list[Struck]()
    file.write_text(config_to_toml(config), encoding="utf-8")
    due, left = deque(strikes), []
    while True:
        arguments = ("train", file, "--output-dir", run.path, "--resume", "auto")
        with Command(*arguments, own_interpreter=False) as command:
            striker = _Striker(command, run, due, struck)
            striker.start()
            code = command.wait()
            striker.join()
            with (directory / "printed.txt").open("a", encoding="utf-8") as printed:
                printed.write(command.printed)
            deadline = time.monotonic() + _ENDED_S
            while (processes := command.session()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            left += [f"{process} is left behind" for process in processes]
        if code != _TERMINATED:
            return code, left, struck


def train_on_hosts(
    config: RunConfig, run: RunDirectory, directory: Path, strikes: tuple[Strike, ...]
) -> tuple[int, list[str], list[Struck]]:
    """Train a run on three hosts, which are network namespaces: the coordinator on one, and workers on two others.

    Returns:
        As `train_under_strikes`.
    """
    file, struck = directory / "config.toml", list[Struck]()
    control = config.control.model_copy(update={"host": ADDRESSES["second"]})
    changes = {"control": control, "timeouts": TIMEOUTS_ON_HOSTS}
    file.write_text(config_to_toml(config.model_copy(update=changes)), encoding="utf-8")
    with Network(f"strikes-{os.getpid()}") as network, ExitStack() as stack:

        def start(host: str, *words: str | Path) -> Command:
            environ = {"NCCL_SOCKET_IFNAME": interface(host)}
            started = Command(*words, network=network.name(host), own_interpreter=False, environ=environ)
            return stack.enter_context(started)

        coordinator = start("second", "coordinator", file, "--output-dir", run.path)
        coordinator.read_until("chameleon agent --coordinator")
        shares = {"first": (config.workers + 1) // 2, "coordinator": config.workers // 2}
        agents = [start(host, "agent", "--run", run.path, "--workers", str(share)) for host, share in shares.items()]
        striker = _Striker(coordinator, run, deque(strikes), struck, network)
        striker.start()
        code = coordinator.wait()
        striker.join()
        left = [f"an agent ended with {ended}" for agent in agents if (ended := agent.wait()) != code]
        (directory / "printed.txt").write_text(
            "".join(each.printed for each in (coordinator, *agents)), encoding="utf-8"
        )
        return code, left, struck


class _Striker(threading.Thread):
    """Carries out the strikes that are due, as long as a command runs."""

    def __init__(
        self,
        command: Command,
        run: RunDirectory,
        due: deque[Strike],
        struck: list[Struck],
        network: Network | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._struck = struck
        self._network = network
        self._command = command
        self._run = run
        self._due = due

    def run(self) -> None:
        rows, events = Tail(self._run.metrics_file), Tail(self._run.events_file)
        committed = evaluating = -1
        while self._due and self._command.is_running:
            committed = max([committed, *(row["step"] for row in rows.new())])
            evaluating = max([evaluating, *(each["step"] for each in events.new() if each["event"] == "evaluating")])
            strike = self._due[0]
            if (evaluating if strike.in_evaluation else committed) >= strike.step:
                self._due.popleft()
                time.sleep(strike.delay_s)
                began = time.time()
                if self._strike(strike):
                    self._struck.append(Struck(strike, began, time.time()))
            else:
                time.sleep(_POLL_S)

    def _strike(self, strike: Strike) -> bool:
        """Carry out a strike; return whether it has hit something."""
        match strike.kind:
            case "fill":
                ballast = fill(self._run.path.parent)
                time.sleep(_STOPPED_S)
                ballast.unlink()
                return True
            case "cut off":
                assert self._network is not None
                self._network.cut_off("second")
                time.sleep(_CUT_OFF_S)
                self._network.connect("second")
                return True
            case "cut" | "cut one way":
                return self._cut(both_ways=strike.kind == "cut")
        return self._send(strike)

    def _cut(self, *, both_ways: bool) -> bool:
        assert self._network is not None
        ways = [("first", "coordinator"), ("coordinator", "first")][: 2 if both_ways else 1]
        for way in ways:
            self._network.drop(*way)
        events, is_lost, deadline = Tail(self._run.events_file), False, time.monotonic() + _MAX_CUT_S
        began = time.time()
        while not is_lost and self._command.is_running and time.monotonic() < deadline:
            is_lost = any(event["event"] == "lost" and event["time"] >= began for event in events.new())
            time.sleep(_POLL_S)
        for way in ways:
            self._network.heal(*way)
        return True

    def _send(self, strike: Strike) -> bool:
        processes = self._processes(strike)
        if strike.target == "worker" and processes:
            assert strike.worker is not None
            log = FaultLog(self._run.faults_file)
            log.append(worker=strike.worker, kind=strike.kind, phase=None, step=None)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(_SIGNALS[strike.kind])
        if strike.kind == "stop":
            time.sleep(_STOPPED_S)
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        return bool(processes)

    def _coordinator(self) -> int | None:
        with contextlib.suppress(ConfigError):
            return self._run.read_control().pid
        return None

    def _processes(self, strike: Strike) -> list[psutil.Process]:
        """Return the processes that a signal goes to; none if there is none at the moment."""
        session = self._command.session()
        match strike.target:
            case "all":
                return session
            case "launcher":
                return [process for process in session if process.pid == self._command.pid]
            case "coordinator":
                return [process for process in session if process.pid == self._coordinator()]
            case "background process":  # another child of the coordinator, beside what tracks its resources
                return [
                    process
                    for process in session
                    if _parent(process) == self._coordinator() and not _is_tracker(process)
                ]
            case "agent":  # the launcher's only other child
                coordinator = self._coordinator()
                return [
                    process
                    for process in session
                    if coordinator and process.pid != coordinator and _parent(process) == self._command.pid
                ]
            case "fork server":  # the oldest one
                servers = [process for process in session if _is_fork_server(process)]
                return sorted(servers, key=lambda process: process.create_time())[:1]
            case "worker":
                return [process for process in session if _writes(process, f"worker-{strike.worker}.log")]
        return []


def _parent(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return None


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return True


def _is_fork_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.name() == "fork server")
    return False


def _writes(process: psutil.Process, log: str) -> bool:
    """Return whether the output of a process goes to this log."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink().name.endswith(log)
    return False
