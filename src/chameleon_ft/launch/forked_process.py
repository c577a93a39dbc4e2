"""Processes that are forked from a launcher, each with a pipe to it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.launch.processes import SIGNALS, signals_deferred
from chameleon_ft.runtime.process import end_with_parent, exit_immediately

FORK: Final = get_context("fork")


class ForkedProcess:
    """A process that is forked from this one, with a pipe to it."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process: BaseProcess = FORK.Process(target=_run, args=(target, self.pipe, theirs))
        with signals_deferred():  # it has the handlers of this process at first
            self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """Return what the process sends, or raise it if it is an error."""
        found = received(self.pipe)
        if found is None:
            raise ControlError(f"the agent of this machine was ended by {describe_end(self.process)}")
        if isinstance(found, ChameleonError):
            raise found
        return found

    def begin(self) -> None:
        """Let the process continue after its answer. If it has ended, `pipe` is at its end."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def received(pipe: Connection) -> Any:
    """Return the next message of a process; None once it has ended."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def describe_end(process: BaseProcess) -> str:
    """Wait for the end of a process, and return a description of its signal or its exit code."""
    process.join()
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"an error (exit code {code})"


def _run(target: Callable[[Connection], None], launchers: Connection, pipe: Connection) -> None:
    end_with_parent()
    launchers.close()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    target(pipe)
    exit_immediately(0)
