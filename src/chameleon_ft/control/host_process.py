"""Processes of this host: each is watched, killed and reaped by its pidfd, also if it is no child of this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import Self


class HostProcess:
    """A process that is watched and signalled by its pidfd, which never means another process.

    The id of a child of this process is as safe, because the kernel does not reuse it before `wait` returns.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_alive = True  # until `wait` returns
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
    return stat.rpartition(")")[2].split()  # the command name before it may contain spaces and brackets
