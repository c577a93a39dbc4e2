"""The processes of a run on this machine: their signals, the fork server, and those that are forked from a launcher."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final, TextIO, cast

from chameleon_ft.clock import unix_s
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.host.fork_server import ForkServer, end_with_parent, exit_immediately, receive, terminations
from chameleon_ft.protocol.job_info import JobInfo
from chameleon_ft.protocol.messages import Examine
from chameleon_ft.protocol.parts import HostReport
from chameleon_ft.recovery import warm_up

RANK: Final = "chameleon_ft.worker.rank:spawned_rank_main"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_INSPECTION: Final = "chameleon_ft.worker.inspection:inspection_main"
_EXAMINATION: Final = "chameleon_ft.worker.preflight:examination_main"
_EXAMINATION_S: Final = 60.0


@cache
def start_fork_server() -> ForkServer:
    """Start a fork server that loads everything a rank needs; all runs of this process share it."""
    return ForkServer("chameleon_ft.worker.preload", SIGNALS)


@cache
def load_solvers() -> None:
    """Import, and after an installation compile, what decisions need, so that the first one does not wait for it.

    Once: processes that are forked later have it, too.
    """
    for name in ("rustworkx", "scipy.optimize", "scipy.sparse.csgraph"):
        importlib.import_module(name)
    warm_up(partial(print, flush=True))
    # All of this stays; a garbage collection that scans it takes as long as half a decision.
    gc.collect()
    gc.freeze()


@contextmanager
def unattended() -> Iterator[None]:
    """Depend on no terminal and no disk for output inside the block; restore the actions of signals at its end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    outputs = sys.stdout, sys.stderr
    try:
        with redirect_stdout(_Output(sys.stdout).as_text()), redirect_stderr(_Output(sys.stderr).as_text()):
            yield
    finally:
        for output in outputs:
            _drop_unwritten(output)
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _Output:
    """An output whose terminal is closed or whose disk is full, which must not be an error of the code that prints."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def as_text(self) -> TextIO:
        return cast("TextIO", self)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _drop_unwritten(output: TextIO) -> None:
    """Drop what cannot be written, or the interpreter would fail to write it at its end."""
    try:
        output.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle signals that arrive within the block at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_handled(
    *, interrupt: Callable[[], object], terminate: Callable[[signal.Signals], object]
) -> Iterator[None]:
    """Call these functions at signals inside the block: `terminate` at SIGTERM and SIGHUP.

    After it, SIGTERM and SIGHUP are ignored until `unattended` restores them: it is decided how this process ends. In
    another thread than the main one, in which Python handles signals, nothing is called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, endings = asyncio.get_running_loop(), terminations()
    loop.add_signal_handler(signal.SIGINT, interrupt)
    for number in endings:
        loop.add_signal_handler(number, terminate, number)
    try:
        yield
    finally:
        # For a moment, the default action is in force.
        with signals_deferred():
            for number in (signal.SIGINT, *endings):
                loop.remove_signal_handler(number)
            for number in endings:
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_passed_to(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `handler` with each SIGINT, SIGTERM and SIGHUP inside the block.

    After it, the latter two are ignored until `unattended` restores them: it is decided how this process ends.
    """

    def handle(number: int, _: object) -> None:
        handler(signal.Signals(number))

    endings = terminations()
    before = signal.signal(signal.SIGINT, handle)
    for number in endings:
        signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for number in endings:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_not_lost() -> Iterator[None]:
    """Have a signal end the block as it does now, or at its end: compilers swallow exceptions in their callbacks."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *terminations())}
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if callable(handler := before[signal.Signals(number)]):
            handler(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
    for again in came[:1]:
        signal.raise_signal(again)


async def inspect(config: RunConfig, *, workers: int) -> JobInfo:
    """Load the job in a process of its own. Raises the error of loading it.

    `workers`: the number that is to run on this host; it is an error if it lacks devices for them.
    """
    try:
        found = await _answer_of(_INSPECTION, config=config, workers=workers)
    except EOFError:
        raise ControlError(f"job {config.job}: the process that loads it ended without reporting an error") from None
    if isinstance(found, ChameleonError):
        raise found
    assert isinstance(found, JobInfo)
    return found


async def examine(order: Examine) -> HostReport:
    """Examine this host in a process of its own, because finding devices may initialize their driver."""
    problem = f"the examination of its devices has not ended within {_EXAMINATION_S:g} s; look at their driver"
    try:
        async with asyncio.timeout(_EXAMINATION_S):
            found = await _answer_of(_EXAMINATION, order=order)
    except TimeoutError:
        return HostReport(problem=problem, clock_s=unix_s())
    except (EOFError, ControlError) as error:
        reason = str(error) or "the process that examines its devices ended without an error; look at their driver"
        return HostReport(problem=reason, clock_s=unix_s())
    assert isinstance(found, HostReport)
    return found


async def _answer_of(function: str, **arguments: Any) -> Any:
    """Return what a function sends through its pipe in a process of its own. Raises EOFError if it sends nothing."""
    ours, theirs = Pipe(duplex=False)
    with ours:
        with theirs:
            process = await start_fork_server().fork(function, theirs.fileno(), **arguments)
        try:
            return await receive(ours)
        finally:
            process.kill()
            await process.wait()


FORK: Final = get_context("fork")


class ForkedProcess:
    """A process that is forked from this one, with a pipe to it."""

    def __init__(self, target: Callable[[Connection], None]) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process: BaseProcess = FORK.Process(target=_run, args=(target, self.pipe, theirs))
        # The new process has the handlers of this one at first.
        with signals_deferred():
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
