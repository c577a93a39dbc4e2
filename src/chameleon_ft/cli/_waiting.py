"""What is being waited for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console

from chameleon_ft.recovery import warm_up
from chameleon_ft.recovery.warm_up import COMPILING, COMPILING_AFTER_S

__all__ = ["compile_kernels", "waiting"]


def waiting(words: str) -> AbstractContextManager[object]:
    """Show `words` on standard error while something is done, and nothing where that is no terminal."""
    console = Console(stderr=True)
    return console.status(words) if console.is_terminal else nullcontext()


def compile_kernels(compile_all: Callable[[], None] = warm_up, *, long_s: float = COMPILING_AFTER_S) -> None:
    """Compile what schedules and searches, or load it, and say why on standard error where that takes `long_s` or more.

    Whatever is timed after it is timed without that.
    """
    saying = threading.Timer(long_s, lambda: print(COMPILING, file=sys.stderr, flush=True))
    saying.daemon = True
    saying.start()
    try:
        compile_all()
    finally:
        saying.cancel()
