"""What is being waited for, on a terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from rich.console import Console

__all__ = ["waiting"]


def waiting(words: str) -> AbstractContextManager[object]:
    """Show `words` on standard error while something is done, and nothing where that is no terminal."""
    console = Console(stderr=True)
    return console.status(words) if console.is_terminal else nullcontext()
