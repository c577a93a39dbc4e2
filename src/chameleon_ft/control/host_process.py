"""Processes of this host: each is watched, killed and reaped by its pidfd, also if it is no child of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

__all__ = ["HostProcess", "is_stopped", "read_stat"]


class HostProcess:
    """A process by its number, which the kernel gives to no other one as long as this object watches it.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_alive = True  # until `wait` returns
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

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


def read_stat(pid: int) -> list[str]:
    """Return the fields of proc_pidread_stat(5) from the state on; none if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the command name before it may contain spaces and brackets
