"""Functions that tests call in forked processes, which have to import this module, and nothing else for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

__all__ = ["echo", "sleep"]


def echo(pipe: int, *, text: str) -> None:
    """Send a text, the parent and the blocked signals through a pipe, and end with code 7."""
    Connection(pipe, readable=False).send((text, os.getppid(), signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    sys.exit(7)


def sleep() -> None:
    """Outlast every test."""
    time.sleep(100)
