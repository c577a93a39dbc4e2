"""Tasks of a rank beside its training thread in one generation: they move gradients, parameters, layers and copies.

The rules of the threads of a rank; docs/architecture.md ("Threads of a rank") has all threads and the reasons.

- The *training thread* owns the state of the rank: its layers, optimizer, gradient buffers and steps. No other thread
  changes which layers there are, which of them are held, or what is updated.
- A *task* of the mover has a thread of its own, because it waits for messages: a thread that served several peers could
  wait for the wrong one first. A task reads state that is constant until the next vote. It writes only memory that it
  was given for that: copies, tensors of layers that arrive, parameters that another rank has updated.
- A result comes back as that of the task, for which the training thread waits; or as a *delivery*, which the training
  thread carries out between two operations and before each vote.
- `Mover.changed` guards what both read and write. No thread holds it while it waits for a message.
- The first error of a task ends the mover: every later wait raises it.
- To end tasks that wait for messages, the communicators are interrupted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

from chameleon_ft.worker.communicators.base import CommunicationError, Communicators

_POLL_S: Final = 0.01
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class Mover:
    """Runs the tasks of a rank in one generation; the docstring of this module has the rules.

    Attributes:
        communicators: They carry the messages of the tasks, and are interrupted to end them.
        changed: It guards what the training thread and tasks share, and is notified of each change.
    """

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._deliveries: deque[Callable[[], None]] = deque()
        self._error: BaseException | None = None

    # --- for the training thread -------------------------------------------------------------------------------------

    def carry_out_deliveries(self) -> None:
        """Carry out what other threads have delivered, in order."""
        while self._deliveries:
            self._deliveries.popleft()()

    def abandon(self) -> None:
        """Note that the generation is over. Tasks whose messages other ranks may still need go on until `close`."""
        with self.changed:
            # A new error: the traceback of one that was raised would keep messages in flight alive.
            self._error = CommunicationError(None, "the generation is over")
            self._deliveries.clear()
            self.changed.notify_all()

    def close(self) -> None:
        """End all tasks, and interrupt the communicators for that."""
        self.abandon()
        for thread in self._threads:
            while thread.is_alive():
                self.communicators.interrupt()
                thread.join(_POLL_S)

    # --- for any thread ----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether a task has failed, or the generation is over."""
        return self._error is not None

    def start(
        self, work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Start a task; its future has its result or its error. Once the generation is over, none is started."""
        future: Future[_Result] = Future()
        name = getattr(work, "__name__", "task")

        def run() -> None:
            try:
                with self.ended_by_errors():
                    future.set_result(work(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the training thread raises it
                # A traceback would keep the operation alive.
                future.set_exception(error.with_traceback(None))

        with self.changed:
            if self._error is not None:
                future.set_exception(self._error)
                return future
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=run, name=f"mover: {name}", daemon=True))
            self._threads[-1].start()
        return future

    def deliver(self, act: Callable[[], None]) -> None:
        """Have the training thread do something soon, between two operations or before a vote."""
        with self.changed:
            if self._error is None:
                self._deliveries.append(act)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait, with `changed` held, until something is true. Raises the error of a task."""
        self.changed.wait_for(lambda: self._error is not None or predicate(), timeout_s)
        self.check()

    def check(self) -> None:
        """Raise the first error of a task, or CommunicationError if the generation is over."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """End the mover with an error that is raised inside the block."""
        try:
            yield
        except BaseException as error:
            with self.changed:
                self._error = self._error or error.with_traceback(None)
                self.changed.notify_all()
            if not isinstance(error, CommunicationError):
                # Other ranks wait for what this one was to send.
                self.communicators.interrupt()
            raise
