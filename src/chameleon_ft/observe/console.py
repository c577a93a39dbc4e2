"""The terminal that is printed to, or the file or pipe in its place."""

from __future__ import annotations

import re
from typing import IO, cast

from rich import box
from rich.console import Console

__all__ = ["output"]

_PLAIN_WIDTH = 120  # characters, of output that is no terminal and has no width of its own
_BLANKS_AT_THE_END = re.compile(r" +$", re.MULTILINE)


def output(console: Console | None = None) -> tuple[Console, box.Box]:
    """Return `console`, or one for standard output, and the frame for its tables.

    Where it is no terminal the frame is plain, and no line ends in blanks, as those of a table without a frame would.
    """
    console = console or Console(highlight=False)
    if console.is_terminal:
        return console, box.ROUNDED
    console.file = cast("IO[str]", _Trimmed(console.file))
    console.width = _PLAIN_WIDTH
    return console, box.ASCII


class _Trimmed:
    """As much of a text file as rich needs, which writes whole lines."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(_BLANKS_AT_THE_END.sub("", text))
        return len(text)

    def flush(self) -> None:
        self._file.flush()
