"""Waiting for gloo in a way that can be called off.

When a connection ends in the middle of a message, gloo (as of torch 2.13) tells the operations that are queued, but not
the one whose bytes are under way: that one sleeps until its timeout. So a thread of its own sleeps there, and the
training thread waits for it until told that it is pointless.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol

__all__ = ["CalledOffError", "Waiter"]


class Waitable(Protocol):
    def wait(self) -> object: ...


class CalledOffError(RuntimeError):
    """The wait was called off; the operation may still be sleeping."""


class _Ticket:
    """One wait. Whoever releases `settled` first, the waiting thread or `call_off`, decides how it ended."""

    def __init__(self, work: Waitable) -> None:
        self.work: Waitable | None = work
        self.error: BaseException | None = None
        self.finished = False
        self.settled = threading.Semaphore(0)


class Waiter:
    """Waits for one operation at a time on behalf of the training thread."""

    def __init__(self) -> None:
        self._tickets: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._current: _Ticket | None = None
        self._called_off = False
        self._thread = threading.Thread(target=self._work, name="gloo-waiter", daemon=True)
        self._thread.start()

    def wait(self, work: Waitable) -> None:
        """Block until `work` is done. Raises its error, or CalledOffError."""
        ticket = _Ticket(work)
        self._current = ticket
        if self._called_off:  # looked at after `_current` is set, as `call_off` does it the other way round
            raise CalledOffError("the wait was called off")
        self._tickets.put(ticket)
        ticket.settled.acquire()
        self._current = None
        if ticket.error is not None:
            raise ticket.error
        if not ticket.finished:
            raise CalledOffError("the wait was called off")

    def call_off(self) -> None:
        """End the wait that is going on, and every later one, at once. Called from any thread."""
        self._called_off = True
        if (ticket := self._current) is not None:
            ticket.settled.release()

    def stop(self) -> None:
        """Have the thread end as soon as it wakes."""
        self._tickets.put(None)

    @property
    def asleep(self) -> bool:
        """Whether the thread still sleeps in an operation that was called off, after `stop`."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Give the thread a moment to end."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            assert ticket.work is not None
            try:
                ticket.work.wait()
                ticket.finished = True
            except BaseException as error:  # noqa: BLE001
                ticket.error = error.with_traceback(None)  # a traceback would keep the operation alive
            ticket.work = None
            ticket.settled.release()
            del ticket
