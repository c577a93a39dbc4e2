"""Tasks in the background of an event loop, and calls that may block it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


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


async def in_thread(call: Callable[[], _Result]) -> _Result:
    """Run a call that may block in a thread of its own, for which the end of the process does not wait."""
    result: Future[_Result] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name="waiting", daemon=True).start()
    return await asyncio.wrap_future(result)
