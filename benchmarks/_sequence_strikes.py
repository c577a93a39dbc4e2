"""Signals to the processes of a run that trains by `chameleon train`, at drawn moments."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

import psutil

from benchmarks._live_run import Tail
from benchmarks._sequence_draws import Strike
from chameleon_ft.config import RunConfig, config_to_toml
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import FaultLog, RunDirectory
from tests.harness import Command

__all__ = ["train_under_strikes"]

_POLL_S: Final = 0.005
_STOPPED_S: Final = 2.0  # of a process that is stopped; longer than a recovery takes
_ENDED_S: Final = 30.0  # for processes that end with the run
_TERMINATED: Final = 75  # exit code of a run that is to be resumed
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


def train_under_strikes(config: RunConfig, directory: Path, strikes: tuple[Strike, ...]) -> tuple[int, list[str]]:
    """Train a run in ``directory / "run"`` by one command line, which is repeated while it ends as terminated.

    Returns:
        The exit code of the last command, and a description of each process that was left behind.
    """
    file, run = directory / "config.toml", RunDirectory(directory / "run")
    file.write_text(config_to_toml(config), encoding="utf-8")
    due, left = deque(strikes), []
    while True:
        arguments = ("train", file, "--output-dir", run.path, "--resume", "auto")
        with Command(*arguments, own_interpreter=False) as command:
            striker = _Striker(command, run, due)
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
            return code, left


class _Striker(threading.Thread):
    """Sends the signals that are due, as long as a command runs."""

    def __init__(self, command: Command, run: RunDirectory, due: deque[Strike]) -> None:
        super().__init__(daemon=True)
        self._command = command
        self._run = run
        self._due = due
        self._committed = -1

    def run(self) -> None:
        rows = Tail(self._run.metrics_file)
        while self._due and self._command.is_running:
            for row in rows.new():
                self._committed = max(self._committed, row["step"])
            if self._committed >= self._due[0].step:
                strike = self._due.popleft()
                time.sleep(strike.delay_s)
                self._send(strike)
            else:
                time.sleep(_POLL_S)

    def _send(self, strike: Strike) -> None:
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


def _parent(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return None


def _is_fork_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.name() == "fork server")
    return False


def _writes(process: psutil.Process, log: str) -> bool:
    """Return whether the output of a process goes to this log."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink().name.endswith(log)
    return False
