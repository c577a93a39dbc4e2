"""Manners of a process that belongs to a run."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["end_with_parent", "ignore_interrupts", "wake_on_time"]

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


def end_with_parent() -> None:
    """Have the kernel end this process with its parent, so that nothing is left behind whatever happens to that."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


def ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to every process, to the coordinator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def wake_on_time() -> None:
    """Have this thread's sleeps end when they should, and not up to 50 us later as is usual."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
