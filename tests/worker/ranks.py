"""Real processes that take the part of ranks: each runs the function that a test gives it, and answers."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from chameleon_ft.config import Timeouts
from chameleon_ft.host.fork_server import end_with_parent
from chameleon_ft.worker.communicators.base import Membership, Rendezvous
from chameleon_ft.worker.communicators.gloo import GlooCommunicators
from chameleon_ft.worker.communicators.store import open_store, serve_store

TIMEOUTS = Timeouts(heartbeat_timeout_s=10.0, watchdog_min_s=15.0, collective_timeout_s=60.0, rendezvous_s=90.0)

RankFunction = Callable[..., Any]


class RankLostError(Exception):
    """A rank has ended without an answer."""


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Ranks:
    """`count` processes with a store between them; use as a context manager.

    They are forked from the server that `chameleon_ft.launch` uses, which has torch imported.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._generation = 0
        self._stack = ExitStack()
        store = f"127.0.0.1:{self._stack.enter_context(serve_store('127.0.0.1'))}"
        self.rendezvous = Rendezvous(partial(open_store, store), b"a secret")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["chameleon_ft.worker.preload"])
        forkserver.ensure_running()
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: RankFunction, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run ``function(*arguments[rank])`` in the first ranks and return what they return.

        Raises AssertionError with the tracebacks of those that raised. Where a rank ended instead, its place
        holds a RankLostError.
        """
        self.start(function, arguments)
        return self.results(len(arguments))

    def start(self, function: RankFunction, arguments: Sequence[tuple[Any, ...]]) -> None:
        for pipe, own in zip(self._pipes, arguments, strict=False):
            pipe.send((function, own))

    def results(self, count: int) -> list[Any]:
        answers = [self._answer(pipe) for pipe in self._pipes[:count]]
        raised = [f"rank {rank} raised:\n{answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        assert not raised, "\n".join(raised)
        return [answer if isinstance(answer, RankLostError) else answer[0] for answer in answers]

    def memberships(
        self, groups: Sequence[tuple[int, ...]] = (), *, members: Sequence[int] | None = None
    ) -> list[Membership]:
        """The memberships of a generation that is new, one for each rank; rank and worker are the same here."""
        self._generation += 1
        everyone = tuple(range(self.count)) if members is None else tuple(members)
        return [
            Membership(
                generation=self._generation,
                worker=worker,
                members=everyone,
                groups=tuple(groups),
                channels=(),
                rendezvous=self.rendezvous,
            )
            for worker in everyone
        ]

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            process.kill()
            process.join()
        self._stack.close()

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            return RankLostError()


def _rank(pipe: Connection) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # without waiting for threads of libraries
        try:
            answer: Any = (function(*arguments),)
        except Exception:  # noqa: BLE001
            answer = traceback.format_exc()
        pipe.send(answer)


@contextmanager
def opened(membership: Membership, timeouts: Timeouts = TIMEOUTS) -> Iterator[GlooCommunicators]:
    """The communicators of a membership, open inside the block."""
    communicators = GlooCommunicators(timeouts=timeouts, address="127.0.0.1")
    try:
        communicators.open(membership)
        yield communicators
    finally:
        communicators.close()


@contextmanager
def interrupted_in(
    function: str, communicators: GlooCommunicators, *, after: int | None = None, delay_s: float = 0.0
) -> Iterator[None]:
    """Once this thread is inside a function of this name, interrupt as the control thread does, until the block ends.

    With `after`, not before the process with that id has ended; with `delay_s`, so many seconds later.
    """
    thread = threading.get_ident()
    left = threading.Event()

    def interrupt() -> None:
        while not left.is_set() and (
            not _is_inside(function, sys._current_frames().get(thread)) or (after is not None and _lives(after))
        ):
            time.sleep(0.001)
        left.wait(delay_s)
        while not left.wait(0.005):
            communicators.interrupt()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        yield
    finally:
        left.set()
        interrupter.join()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _is_inside(function: str, frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
