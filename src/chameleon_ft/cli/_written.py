"""What a command has written beside what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["tell_written"]


def tell_written(*, json: bool, **files: Path | None) -> None:
    """Say of each file that was written where it is: `picture=PATH` is told as "picture written to PATH".

    On standard error where standard output is JSON. None is a file that was not asked for.
    """
    for what, path in files.items():
        if path is not None:
            print(f"{what} written to {path}", file=sys.stderr if json else sys.stdout)
