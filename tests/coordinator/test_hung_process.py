"""The examination of real processes that hang in different ways."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from chameleon_ft.events.evidence import Evidence
from chameleon_ft.host.processes import HostProcess, examine, is_stopped

pytestmark = pytest.mark.multiprocess

_PYTHON = sys.executable
SCRIPT = """
import ctypes, os, signal, sys, threading, time
from chameleon_ft.worker.control_client import Activity

activity = Activity()
activity.publish()
activity.begin("F3")
if "deaf" in sys.argv:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
print("ready", flush=True)
if "lock" in sys.argv:
    ctypes.PyDLL(None).sleep(1000)  # the lock
if "stopped" in sys.argv:
    for _ in range(6):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    os.kill(os.getpid(), signal.SIGSTOP)  # the stop
    while True:
        pass
while True:
    time.sleep(1000)  # no lock
"""


@contextmanager
def hanging(directory: Path, *how: str) -> Iterator[int]:
    """A process that hangs."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([_PYTHON, script, *how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def the_line(directory: Path, mark: str) -> str:
    lines = (directory / "script.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{directory / 'script.py'}:{number} in <module>"


@pytest.mark.parametrize(("how", "mark"), [((), "no lock"), (("lock",), "the lock")])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_writes_its_own_stacks(tmp_path: Path, how: tuple[str, ...], mark: str, stopped: bool) -> None:
    with hanging(tmp_path, *how) as pid:
        while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
            pass
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            while not is_stopped(pid):
                pass
        process, activity = asyncio.run(examine(HostProcess(pid)))
    assert process.startswith("state T" if stopped else "state S")
    evidence = Evidence.parse(activity)
    assert evidence.place == the_line(tmp_path, mark)
    assert str(evidence.last) == "in F3"


def test_py_spy_reads_the_stacks_of_a_process_that_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text('#!/bin/sh\necho "Thread $3 (idle)"\necho "    forward (/home/me/model.py:7)"\n')
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{spy.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with hanging(tmp_path, "deaf") as pid:
        _, activity = asyncio.run(examine(HostProcess(pid)))
    evidence = Evidence.parse(activity)
    assert evidence.place == "/home/me/model.py:7 in forward"
    assert f"Thread {pid}" in evidence.stacks
    assert str(evidence.last) == "in F3"


def test_a_process_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    with hanging(tmp_path) as pid:
        process = HostProcess(pid)
    assert asyncio.run(examine(process)) == ("gone", "")


def test_a_stopped_process_is_where_it_was_stopped(tmp_path: Path) -> None:
    for _ in range(10):  # a signal to the process finds its main thread further on in one of three
        with hanging(tmp_path, "stopped") as pid:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            _, activity = asyncio.run(examine(HostProcess(pid)))
        assert Evidence.parse(activity).place == the_line(tmp_path, "the stop")
