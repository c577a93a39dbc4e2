"""Signals and pipes of the processes of a run, the fork server, and the process of background work."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import Pipe, active_children, resource_tracker
from multiprocessing.context import BaseContext
from types import FrameType
from typing import Final

from chameleon_ft.config import RunConfig
from chameleon_ft.control.job_info import JobInfo
from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.recovery import warm_up
from chameleon_ft.runtime.fork_server import ForkServer, receive
from chameleon_ft.runtime.process import end_with

__all__ = [
    "RANK",
    "SIGNALS",
    "background",
    "inspect",
    "load_solvers",
    "signals_handled",
    "signals_not_lost",
    "start_fork_server",
]

RANK: Final = "chameleon_ft.runtime.rank:spawned_rank_main"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

_INSPECTION: Final = "chameleon_ft.runtime.inspection:inspection_main"
_NICENESS = 10  # yields to ranks that compute on all cores, and still makes progress


@cache
def start_fork_server() -> ForkServer:
    """Start a fork server that loads everything a rank needs; all runs of this process share it."""
    return ForkServer("chameleon_ft.runtime.preload", SIGNALS)


@contextmanager
def background(context: BaseContext) -> Iterator[Executor]:
    """Yield an executor of one process for long work that is not urgent; it is killed at the end of the block."""
    others = set(active_children())
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=_init_background, initargs=(os.getpid(),))
    if context.get_start_method() == "spawn":
        resource_tracker.ensure_running()  # its own start, which that of the process includes, would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        executor.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield executor
    finally:
        for process in set(active_children()) - others:
            process.kill()
        executor.shutdown(cancel_futures=True)


def _init_background(parent: int) -> None:
    end_with(parent)
    # Before lowering the priority, which makes this second a minute beside ranks that compute on all cores.
    load_solvers()
    os.nice(_NICENESS)


def load_solvers() -> None:
    """Import, and after an installation compile, what decisions need, so that the first one does not wait for it."""
    for name in ("rustworkx", "scipy.optimize", "scipy.sparse.csgraph"):
        importlib.import_module(name)
    warm_up()
    # All of this stays; a garbage collection that scans it takes as long as half a decision.
    gc.collect()
    gc.freeze()


@contextmanager
def signals_handled(**handlers: Callable[[], object]) -> Iterator[None]:
    """Call these handlers, by the names of their signals, inside the block."""
    loop = asyncio.get_running_loop()
    for name, handler in handlers.items():
        loop.add_signal_handler(signal.Signals[name], handler)
    try:
        yield
    finally:
        for name in handlers:
            loop.remove_signal_handler(signal.Signals[name])


@contextmanager
def signals_not_lost() -> Iterator[None]:
    """Have a signal end the block as it does now, or at its end: compilers swallow exceptions in their callbacks."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if callable(handler := before[signal.Signals(number)]):
            handler(number, frame)

    for number in SIGNALS:
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
    ours, theirs = Pipe(duplex=False)
    with ours:
        with theirs:
            process = await start_fork_server().fork(_INSPECTION, theirs.fileno(), config=config, workers=workers)
        try:
            found = await receive(ours)
        except EOFError:
            raise ControlError(f"job {config.job}: the process that loads it ended without a word") from None
        finally:
            process.kill()
            await process.wait()
    if isinstance(found, ChameleonError):
        raise found
    assert isinstance(found, JobInfo)
    return found
