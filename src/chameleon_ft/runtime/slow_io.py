"""Reports reads and writes of this rank that take long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from chameleon_ft.control.wire.messages import SlowIO
from chameleon_ft.runtime.activity import Activity

__all__ = ["SlowIOReporter"]

_FIRST_S: Final = 10.0


class SlowIOReporter:
    """Tells the coordinator while this rank reads or writes for long, for which no worker is given up.

    Args:
        activity: what the training thread is doing.
        send: to the coordinator, from any thread.
        first_s: seconds until it is told first; then whenever it has taken twice as long.
    """

    def __init__(self, activity: Activity, send: Callable[[SlowIO], None], *, first_s: float = _FIRST_S) -> None:
        self._activity = activity
        self._send = send
        self._first_s = first_s

    @contextmanager
    def waiting(self, what: str, generation: int) -> Iterator[None]:
        """The training thread waits for the disk inside the block."""
        over = threading.Event()
        # A thread of its own, for the training thread may be stuck in the file system.
        threading.Thread(target=self._tell, args=(what, generation, over), name="slow io", daemon=True).start()
        try:
            with self._activity.waiting(what):
                yield
        finally:
            over.set()

    def _tell(self, what: str, generation: int, over: threading.Event) -> None:
        pause_s = since_s = self._first_s
        while not over.wait(pause_s):
            self._send(SlowIO(generation=generation, doing=what, since_s=since_s))
            pause_s, since_s = since_s, 2 * since_s
