"""Functions that tests call in forked processes, which have to import this module, and nothing else for it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from multiprocessing.connection import Connection


def echo(pipe: int, *, text: str) -> None:
    """Send a text, the parent and the blocked signals through a pipe, and end with code 7."""
    Connection(pipe, readable=False).send((text, os.getppid(), signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    sys.exit(7)


def count_frozen(pipe: int) -> None:
    """Send how many objects garbage collections leave alone."""
    Connection(pipe, readable=False).send(gc.get_freeze_count())


def sleep() -> None:
    """Outlast every test."""
    time.sleep(100)
