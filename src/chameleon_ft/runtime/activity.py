"""Activity of the training thread, which the control thread reports, and reports of reads and writes that take long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chameleon_ft.control.wire.messages import SlowIO

__all__ = ["Activity", "SlowIOReporter"]


class Activity:
    """Activity of the training thread, which writes it; the control thread reads it. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.idle("starting")

    def begin(self, doing: str) -> None:
        """Note that the thread computes, by itself."""
        self._state = (doing, False, time.monotonic())

    def idle(self, doing: str) -> None:
        """Note that the thread waits for an order."""
        self._state = (doing, True, time.monotonic())

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Note that inside the block the thread waits, for another rank or for memory or disk, and then computes."""
        before, _, _ = self._state
        self.idle(doing)
        try:
            yield
        finally:
            self.begin(before)

    def read(self) -> tuple[str, bool, float]:
        """Return (activity, whether it is a wait, seconds since it began)."""
        doing, waiting, since = self._state
        return doing, waiting, time.monotonic() - since


class SlowIOReporter:
    """Tells the coordinator that a read or write of this rank takes long, so that it does not count as a hang.

    Args:
        send: sends to the coordinator, from any thread.
        first_s: seconds until the first report; the next follow whenever the time has doubled.
    """

    def __init__(self, activity: Activity, send: Callable[[SlowIO], None], *, first_s: float = 10.0) -> None:
        self._activity = activity
        self._send = send
        self._first_s = first_s

    @contextmanager
    def waiting(self, doing: str, generation: int) -> Iterator[None]:
        """Report while the training thread waits for the disk inside the block."""
        over = threading.Event()
        # A separate thread, because the training thread may be stuck in the file system.
        threading.Thread(target=self._report, args=(doing, generation, over), name="slow io", daemon=True).start()
        try:
            with self._activity.waiting(doing):
                yield
        finally:
            over.set()

    def _report(self, doing: str, generation: int, over: threading.Event) -> None:
        pause_s = since_s = self._first_s
        while not over.wait(pause_s):
            self._send(SlowIO(generation=generation, doing=doing, since_s=since_s))
            pause_s, since_s = since_s, 2 * since_s
