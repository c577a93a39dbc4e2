"""Life and death of the processes of a run: signals, parents, exits."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

SAME_SIGNAL_S = 1.0
"""Seconds in which `terminations` count once: a batch system sends SIGTERM to all processes, and some pass it on."""

_LIBC = ctypes.CDLL(None)
_F_SETSIG = 10
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


class Terminated(SystemExit):
    """The end of this process by one of `terminations`, told apart from an exit of the code that it runs."""

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


def exit_immediately(code: int) -> NoReturn:
    """End this process without the interpreter's own shutdown.

    The shutdown would wait for threads of libraries, or end in SIGABRT if one of them returns to the interpreter
    meanwhile.
    """
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError):
            output.flush()
    os._exit(code)


def terminations() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end: SIGTERM, and SIGHUP unless that is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent of that number, so that no process is left behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended before


def outlive_parent() -> None:
    """Undo `end_with`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0)


def name_process(name: str) -> None:
    """Set the name of this process that ps and top show, up to 15 characters; processes that it forks have it, too."""
    _LIBC.prctl(_PR_SET_NAME, name.encode())


class Lifeline:
    """A pipe whose write end only this process holds: what ends with its holder, at any depth, watches the read end.

    Attributes:
        descriptor: the read end, to be passed to other processes for `end_with_holder`.
    """

    def __init__(self) -> None:
        self.descriptor, self._held = os.pipe()
        os.register_at_fork(after_in_child=self._let_go)

    def close(self) -> None:
        """End all processes that watch it."""
        self._let_go()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _let_go(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def end_with_holder(descriptor: int) -> None:
    """Have the kernel end this process when the holder of a `Lifeline` ends, even if this process is stopped."""
    # Its owner and signal belong to an open file, which other processes share until it is opened anew.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    with suppress(BlockingIOError):
        os.read(own, 1)
        os._exit(1)  # the holder has ended before


def end_with_parent() -> None:
    """Have the kernel end this process with its present parent."""
    end_with(os.getppid())


def ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to every process, to the coordinator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def wake_on_time() -> None:
    """Have this thread's sleeps end on time, and not up to 50 us later, the kernel's default."""
    _LIBC.prctl(_PR_SET_TIMERSLACK, 1)
