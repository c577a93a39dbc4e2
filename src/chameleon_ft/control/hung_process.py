"""The agent's last look at a hung process of this host, before it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from chameleon_ft.control.host_process import HostProcess, is_stopped, read_stat
from chameleon_ft.observe.evidence import ACTIVITY, ENTRIES, ENTRY_BYTES, STACKS_SIGNAL, Evidence

_EXAMINE_S: Final = 1.0  # bound on the whole examination, since the process is to be killed after it
_SPY_S: Final = 0.5  # the part of it that is left to py-spy, if it is installed
_POLL_S: Final = 0.002
_COMPLETE_AFTER_S: Final = 0.2  # without another line
_LONGEST: Final = 500_000  # characters of the stacks
_OUTERMOST: Final = " in <module>\n"  # the last frame of the oldest thread, which is written last
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


def read_in_progress(pid: int) -> str:
    """Describe the read of a sample in a process that may hold the interpreter's lock; empty if it reads none."""
    try:
        last = Evidence.parse(_activity_file(pid).read_text(encoding="utf-8", errors="replace")).last
    except OSError:  # it has ended, or publishes no activity
        return ""
    return last.doing if last is not None and last.is_reading else ""


async def examine(examined: HostProcess) -> tuple[str, str]:
    """Return a description of a process, and its activity with the stacks of its threads; takes at most a second.

    The process writes its stacks itself, for which it needs no lock of the interpreter; if it is stopped, it has to
    continue for that. If it does not write any, py-spy reads them, where it is installed.
    """
    process, loop = _describe_process(examined.pid), asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def collect() -> None:
        text = _collect(examined)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(found.set_result, text)

    # Of a thread like this the end of this process is not held up.
    threading.Thread(target=collect, name="examine", daemon=True).start()
    await asyncio.wait({found}, timeout=_EXAMINE_S)
    return process, found.result()[:_LONGEST] if found.done() else ""


def _collect(process: HostProcess) -> str:
    """Return the activity of a process with its stacks, as far as they can be had in time."""
    deadline = time.monotonic() + _EXAMINE_S - 2 * _POLL_S
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    pid, text = process.pid, ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # there is no such process or file, or it takes long
        text = _with_own_stacks(process, _activity_file(pid), until=deadline if spy is None else deadline - _SPY_S)
        if len(text) <= ENTRIES * ENTRY_BYTES and spy is not None:
            text = text.ljust(ENTRIES * ENTRY_BYTES)
            arguments = (spy, "dump", "--pid", str(pid), "--nonblocking", "--full-filenames")
            left_s = deadline - time.monotonic()
            text += subprocess.run(arguments, capture_output=True, text=True, timeout=left_s, check=False).stdout
    return text


def _activity_file(pid: int) -> Path:
    """Return the file in memory to which a process writes its activity. Raises FileNotFoundError if it has none."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        if str(descriptor.readlink()).startswith(f"/memfd:{ACTIVITY}"):
            return descriptor
    raise FileNotFoundError(f"process {pid} has no {ACTIVITY}")


def _with_own_stacks(process: HostProcess, activity_file: Path, *, until: float) -> str:
    """Have the process write its stacks, and return its file; without them if it writes none in time.

    The activities are those before the signal, which ends some system calls, and so perhaps the hang.
    """
    activities = activity_file.read_text(encoding="utf-8", errors="replace")
    written, grown_at, stacks = len(activities), None, ""
    if is_stopped(process.pid):
        process.send_to_main_thread(STACKS_SIGNAL)
        process.send_signal(signal.SIGCONT)
    else:
        process.send_signal(STACKS_SIGNAL)
    while time.monotonic() < until:
        if (size := activity_file.stat().st_size) > written:
            written, grown_at = size, time.monotonic()
            stacks = activity_file.read_text(encoding="utf-8", errors="replace")[len(activities) :]
        if grown_at is not None and (stacks.endswith(_OUTERMOST) or time.monotonic() - grown_at > _COMPLETE_AFTER_S):
            break
        time.sleep(_POLL_S)
    return activities + stacks


def _describe_process(pid: int) -> str:
    if not (stat := read_stat(pid)):
        return "gone"
    cpu_s = (int(stat[11]) + int(stat[12])) / _CLOCK_TICKS
    return f"state {stat[0]}, {cpu_s:.2f} s of processor time"
