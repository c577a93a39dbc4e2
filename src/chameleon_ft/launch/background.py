"""The process of background work, which is replaced when it is lost."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Final, cast

from chameleon_ft.errors import ControlError
from chameleon_ft.host.fork_server import end_with
from chameleon_ft.host.processes import is_stopped, read_stat
from chameleon_ft.launch.processes import describe_end, load_solvers, signals_deferred

# The process yields to ranks that compute on all cores, and still makes progress.
_NICENESS = 10
_ATTEMPTS: Final = 3
_LOOK_EVERY_S: Final = 0.5
# A process that has work and has used no processor time for so many looks is replaced.
_MAX_IDLE_LOOKS: Final = 60
_SPAWN: Final = get_context("spawn")


@dataclass(eq=False, slots=True)
class _Work:
    call: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    attempts: int = 0


class BackgroundProcess(Executor):
    """One process for long work that is not urgent.

    Another one takes its place and repeats the work if it ends, is stopped, or has work and uses no processor time for
    half a minute. All methods are called in the thread of the event loop.

    Attributes:
        replaced: called with what became of a process that has been replaced, as "was ended by SIGKILL".
    """

    def __init__(self, context: BaseContext) -> None:
        self.replaced: Callable[[str], None] = lambda _: None
        self._loop = asyncio.get_running_loop()
        self._unfinished: list[_Work] = []
        self._start(context)

    @property
    def pid(self) -> int:
        """The number of the present process."""
        return self._process.pid or 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future result; an error of the call itself is raised there, and the call is not repeated."""
        work = _Work(partial(fn, *args, **kwargs))
        self._unfinished.append(work)
        self._given.put(work)
        return work.result

    def end(self) -> None:
        """Kill the process, whatever it computes."""
        self._looking.cancel()
        self._given.put(None)
        self._process.kill()
        self._process.join()

    def _start(self, context: BaseContext) -> None:
        ours, theirs = context.Pipe()
        # The context itself does not declare its processes.
        self._process: BaseProcess = cast("Any", context).Process(target=_work, args=(theirs, os.getpid()), daemon=True)
        with signals_deferred():
            if context.get_start_method() == "spawn":
                with signals_deferred():
                    # This lifts the block, which the start of the process must not.
                    resource_tracker.ensure_running()
            self._process.start()
        theirs.close()
        self._idle_looks, self._used_ticks, self._was_stopped, self._why_killed = 0, 0, False, ""
        self._given: SimpleQueue[_Work | None] = SimpleQueue()
        # The thread waits for the process, so that the event loop does not; it ends with either of both.
        threading.Thread(target=self._pass_on, args=(ours, self._given), name="background", daemon=True).start()
        self._looking = self._loop.call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        if not self._process.is_alive():
            self._replace()
            return
        self._looking = self._loop.call_later(_LOOK_EVERY_S, self._look)
        stopped, used_ticks = is_stopped(self.pid), sum(map(int, read_stat(self.pid)[11:13]))
        self._idle_looks = self._idle_looks + 1 if self._unfinished and used_ticks == self._used_ticks else 0
        # A debugger may stop it for a moment.
        if stopped and self._was_stopped:
            self._why_killed = "was stopped"
        elif self._idle_looks > _MAX_IDLE_LOOKS:
            self._why_killed = f"used no processor time for {_MAX_IDLE_LOOKS * _LOOK_EVERY_S:.0f} s"
        self._was_stopped, self._used_ticks = stopped, used_ticks
        if self._why_killed:
            self._process.kill()

    def _replace(self) -> None:
        """Start another process for the unfinished work, but for what has been the cause too often."""
        why = self._why_killed or f"was ended by {describe_end(self._process)}"
        self._given.put(None)
        # By now this process has threads, so it cannot be forked safely.
        self._start(_SPAWN)
        for first in self._unfinished[:1]:
            first.attempts += 1
            if first.attempts == _ATTEMPTS:
                lost = f"{_ATTEMPTS} processes of background work were lost with it; the last one {why}"
                self._finish(first, None, ControlError(lost))
        for work in self._unfinished:
            self._given.put(work)
        self.replaced(why)

    def _finish(self, work: _Work, value: Any, error: Exception | None) -> None:
        if work not in self._unfinished:
            return
        self._unfinished.remove(work)
        if work.result.cancelled():
            return
        if error is None:
            work.result.set_result(value)
        else:
            work.result.set_exception(error)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _pass_on(self, pipe: Connection, given: SimpleQueue[_Work | None]) -> None:
        """Send work to the process, and its answers to the event loop, until one of these has ended."""
        with pipe, suppress(EOFError, OSError, RuntimeError):
            while (work := given.get()) is not None:
                answer: tuple[Any, Exception | None] = None, None
                if not work.result.cancelled():
                    try:
                        pipe.send(work.call)
                        answer = pipe.recv()
                    except (EOFError, OSError):
                        raise
                    except Exception as error:  # noqa: BLE001 - of pickling, raised where the result is awaited
                        answer = None, error
                self._loop.call_soon_threadsafe(self._finish, work, *answer)


@contextmanager
def background(context: BaseContext) -> Iterator[BackgroundProcess]:
    """Yield the process of background work, which `context` starts; it is killed at the end of the block."""
    process = BackgroundProcess(context)
    try:
        yield process
    finally:
        process.end()


def _work(pipe: Connection, parent: int) -> None:
    """Do what comes through the pipe."""
    end_with(parent)
    # Before lowering the priority, which makes this second a minute beside ranks that compute on all cores.
    load_solvers()
    os.nice(_NICENESS)
    while True:
        call = pipe.recv()
        answer: tuple[Any, Exception | None]
        try:
            answer = call(), None
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            answer = None, error
        pipe.send(answer)
