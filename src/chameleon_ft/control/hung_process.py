"""The agent's last look at a hung process of this host, before it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from chameleon_ft.observe.evidence import ENTRIES, ENTRY_BYTES, STACKS_SIGNAL

__all__ = ["examine", "is_stopped"]

_EXAMINE_S: Final = 1.0  # bound on the whole examination, since the process is to be killed after it
_SIGNAL_S: Final = 0.5  # bound on the part of it that waits for the process to write its own stacks
_POLL_S: Final = 0.002
_COMPLETE_AFTER_S: Final = 0.05  # without another line
_LONGEST: Final = 500_000  # characters of the stacks
_OUTERMOST: Final = " in <module>\n"  # the last frame of the oldest thread, which is written last
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


async def examine(pid: int, activity_file: Path) -> tuple[str, str]:
    """Return a description of a process, and its activity file with the stacks of its threads; takes at most a second.

    The process writes its stacks itself, for which it needs no lock of the interpreter; if it is stopped, it has to
    continue for that. If it does not write any, py-spy reads them, where it is installed.
    """
    process = _describe_process(pid)
    text = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_EXAMINE_S):
            text = await _with_own_stacks(pid, activity_file)
            if len(text) <= ENTRIES * ENTRY_BYTES:
                text = text.ljust(ENTRIES * ENTRY_BYTES) + await _stacks_by_py_spy(pid)
    return process, text[:_LONGEST]


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state on; none if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the command name before it may contain spaces and brackets


def _describe_process(pid: int) -> str:
    if not (stat := _stat(pid)):
        return "gone"
    cpu_s = (int(stat[11]) + int(stat[12])) / _CLOCK_TICKS
    return f"state {stat[0]}, {cpu_s:.2f} s of processor time"


async def _with_own_stacks(pid: int, activity_file: Path) -> str:
    """Have the process write its stacks, and return its file; without them if it writes none in time.

    The activities are those before the signal, which ends some system calls, and so perhaps the hang.
    """
    try:
        activities = activity_file.read_text(encoding="utf-8", errors="replace")
        written = len(activities)
        os.kill(pid, STACKS_SIGNAL)
        if is_stopped(pid):
            os.kill(pid, signal.SIGCONT)
    except OSError:  # there is no such process or file
        return ""
    loop = asyncio.get_running_loop()
    grown_at, deadline = None, loop.time() + _SIGNAL_S
    stacks = ""
    while loop.time() < deadline:
        if (size := activity_file.stat().st_size) > written:
            written, grown_at = size, loop.time()
            stacks = activity_file.read_text(encoding="utf-8", errors="replace")[len(activities) :]
        if grown_at is not None and (stacks.endswith(_OUTERMOST) or loop.time() - grown_at > _COMPLETE_AFTER_S):
            break
        await asyncio.sleep(_POLL_S)
    return activities + stacks


async def _stacks_by_py_spy(pid: int) -> str:
    """Return the stacks of another process as py-spy reads them; empty if it is not installed or may not read them."""
    command = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if command is None:
        return ""
    arguments = ("dump", "--pid", str(pid), "--nonblocking", "--full-filenames")
    spy = await asyncio.create_subprocess_exec(
        command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        found, _ = await spy.communicate()
    finally:
        if spy.returncode is None:
            spy.kill()
    return found.decode(errors="replace")
