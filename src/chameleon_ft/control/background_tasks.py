"""Tasks that run in the background of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["BackgroundTasks"]


class BackgroundTasks:
    """Starts tasks and keeps each alive until it ends: an event loop itself has only weak references to its tasks.

    Args:
        failed: called with the error of a task; without it, asyncio logs the error.
    """

    def __init__(self, *, failed: Callable[[Exception], None] | None = None) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task in the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> None:
        """Cancel all tasks that have not ended."""
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._failed is not None and not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)
