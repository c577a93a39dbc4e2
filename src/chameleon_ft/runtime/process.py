"""Life and death of the processes of a run: signals, parents, exits."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import NoReturn

__all__ = [
    "SAME_SIGNAL_S",
    "end_with",
    "end_with_parent",
    "end_with_starter",
    "exit_immediately",
    "fork_server",
    "ignore_interrupts",
    "interrupts_held",
    "wake_on_time",
]

SAME_SIGNAL_S = 1.0
"""Seconds in which SIGTERM counts once: a batch system sends it to all processes, and some of them pass it on."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


def exit_immediately(code: int) -> NoReturn:
    """End this process without the interpreter's own shutdown.

    The shutdown would wait for threads of libraries, or end in SIGABRT if one of them returns to the interpreter
    meanwhile.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent of that number, so that no process is left behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended before


def end_with_parent() -> None:
    """Have the kernel end this process with its present parent."""
    end_with(os.getppid())


def end_with_starter() -> None:
    """End this process with the one that had the fork server make it, however that ends."""
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with starter", daemon=True).start()


def fork_server(preload: str, *blocked: signal.Signals) -> ForkServerContext:
    """Start a fork server that imports the module `preload`, and return its context.

    The signals are blocked in it from before its first import, and in all processes that it forks. A terminal sends its
    Ctrl-C, and a batch system its SIGTERM, to every process of the group, but only the starter shall react.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    resource_tracker.ensure_running()  # its own start, which the fork server's includes, would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to every process, to the coordinator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block.

    Blocking the signal would not do: another thread gets it then, and Python raises KeyboardInterrupt in the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # it is not interrupted anyway
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def wake_on_time() -> None:
    """Have this thread's sleeps end on time, and not up to 50 us later, the kernel's default."""
    _LIBC.prctl(_PR_SET_TIMERSLACK, 1)
