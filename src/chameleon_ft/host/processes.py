"""Processes of this host: each is watched, killed and reaped by its pidfd, also if it is no child of this one.

A hung process is examined before the agent kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, Self

from chameleon_ft.events.evidence import ACTIVITY, ENTRIES, ENTRY_BYTES, STACKS_SIGNAL, Evidence


class HostProcess:
    """A process that is watched and signalled by its pidfd, which never means another process.

    The id of a child of this process is as safe, because the kernel does not reuse it before `wait` returns.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # True until `wait` returns.
        self.is_alive = True
        self._pidfd = os.pidfd_open(pid)

    @classmethod
    def found(cls, pid: int, *, started: int) -> Self:
        """Return a process that another one has started.

        Args:
            started: its `start_time`.

        Raises:
            ProcessLookupError: it has ended; another one may have its number.
            PermissionError: it belongs to another user.
        """
        process = cls(pid)
        try:
            # Only now: the number may be another process's by now, but what is watched does not change any more.
            if start_time(pid) != started:
                raise ProcessLookupError(f"process {pid} has ended")
            signal.pidfd_send_signal(process._pidfd, 0)
        except OSError:
            os.close(process._pidfd)
            raise
        return process

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal, unless it has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def send_to_main_thread(self, number: signal.Signals) -> None:
        """Send a signal to the main thread of this process, which is stopped, before it runs any further.

        A signal to a stopped process goes to the thread that runs first once it continues. The others run on meanwhile.
        """
        ctypes.CDLL(None).tgkill(self.pid, self.pid, int(number))

    async def wait(self) -> int | None:
        """Return its exit code, once it has ended, as `subprocess` gives it; None if it is no child of this process."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)
        self.is_alive = False
        os.close(self._pidfd)
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return None
        return os.waitstatus_to_exitcode(status)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    return read_stat(pid)[:1] == ["T"]


def has_ended(pid: int) -> bool:
    """Return whether there is no process of that number, or one that has ended, and that its parent has not reaped."""
    return (read_stat(pid) or ["X"])[0] in "XZ"


def start_time(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the boot; None if there is none."""
    stat = read_stat(pid)
    return int(stat[19]) if stat else None


def read_stat(pid: int) -> list[str]:
    """Return the fields of proc_pidread_stat(5) from the state on; none if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command name before it may contain spaces and brackets.
    return stat.rpartition(")")[2].split()


async def reap_orphans(name: str) -> None:
    """Reap children of this process whose names begin so; wait up to a second for those that are about to end.

    They were children of a process that has ended, and the kernel ends them with it.
    """
    since_s = time.monotonic()
    while orphans := [pid for pid in _children() if _name_of(pid).startswith(name)]:
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() - since_s > _ORPHANS_S:
            return
        await asyncio.sleep(_ORPHANS_POLL_S)


def _children() -> list[int]:
    """Return the numbers of the children of this process; none if the kernel does not list them."""
    found: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_ORPHANS_S: Final = 1.0
_ORPHANS_POLL_S: Final = 0.005
# The whole examination is bounded, because the process is to be killed after it.
_EXAMINE_S: Final = 1.0
# py-spy, if it is installed, gets this part of it.
_SPY_S: Final = 0.5
_POLL_S: Final = 0.002
# Stacks are complete after this time without another line.
_COMPLETE_AFTER_S: Final = 0.2
# The stacks are cut to this many characters.
_LONGEST: Final = 500_000
# The last frame of the oldest thread, which is written last.
_OUTERMOST: Final = " in <module>\n"
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


def read_in_progress(pid: int) -> str:
    """Describe the read of a sample in a process that may hold the interpreter's lock; empty if it reads none."""
    try:
        last = Evidence.parse(_activity_file(pid).read_text(encoding="utf-8", errors="replace")).last
    except OSError:
        # The process has ended, or publishes no activity.
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
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
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
    # There may be no such process or file, or it takes long.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
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
