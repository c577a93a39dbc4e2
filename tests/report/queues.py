"""A queue of file operations whose disk does not answer for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chameleon_ft.storage.file_queue import FileQueue


@contextmanager
def hanging(files: FileQueue, path: Path) -> Iterator[None]:
    """Have the queue stuck in one operation inside the block."""
    answered = threading.Event()
    files.submit(path, answered.wait)
    try:
        yield
    finally:
        answered.set()


def until(condition: Callable[[], object]) -> None:
    """Wait for something that the thread of a queue does."""
    changed = threading.Event()
    while not condition():
        changed.wait(0.01)
