"""What the training thread is doing, for the control thread to tell the coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Activity"]


@dataclass(frozen=True, slots=True)
class _State:
    doing: str
    waiting: bool
    since: float


class Activity:
    """Written by the training thread, read by the control thread. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._state = _State("starting", True, time.monotonic())

    def begin(self, doing: str) -> None:
        """The thread computes, by itself."""
        self._state = _State(doing, False, time.monotonic())

    def idle(self, doing: str) -> None:
        """The thread waits for an order."""
        self._state = _State(doing, True, time.monotonic())

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The thread waits inside the block, for another rank or for memory or disk, and computes after it."""
        before = self._state
        self._state = _State(what, True, time.monotonic())
        try:
            yield
        finally:
            self._state = _State(before.doing, False, time.monotonic())

    def read(self) -> tuple[str, bool, float]:
        """Return (what it does, whether it waits for others, seconds since it began)."""
        state = self._state
        return state.doing, state.waiting, time.monotonic() - state.since
