"""The terminal that commands print tables to, or the file or pipe in its place."""

from __future__ import annotations

from rich import box
from rich.console import Console

__all__ = ["output"]

_PLAIN_WIDTH = 120  # characters, of output that is no terminal and has no width of its own


def output() -> tuple[Console, box.Box]:
    """Return the console for standard output, and the frame for its tables: plain where it is no terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console, box.ROUNDED
    console.width = _PLAIN_WIDTH
    return console, box.ASCII
