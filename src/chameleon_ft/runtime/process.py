"""Manners of a process that belongs to a run."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = [
    "end_now",
    "end_with_parent",
    "end_with_starter",
    "ignore_interrupts",
    "interrupts_held",
    "signals_blocked",
    "wake_on_time",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


def end_now(code: int) -> NoReturn:
    """End this process without the interpreter's own ending.

    That would wait for threads of libraries, or break off with SIGABRT where one of them comes back from what it was at
    while the interpreter ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """Have the kernel end this process with its parent, so that nothing is left behind whatever happens to that."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the line above


def end_with_starter() -> None:
    """End this process with the one that had the fork server make it, however that ends."""
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with starter", daemon=True).start()


def ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to every process, to the coordinator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Have a Ctrl-C wait until the end of the block.

    Blocking the signal would not do: another thread gets it then, and Python raises KeyboardInterrupt in the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # it is not interrupted anyway
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block these signals inside the block; in processes that are forked inside it they stay blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wake_on_time() -> None:
    """Have this thread's sleeps end when they should, and not up to 50 us later as is usual."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
