"""What a command writes beside what it prints: whether it can, said beforehand, and where it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from chameleon_ft.errors import ConfigError

__all__ = ["require_places", "tell_written"]


def require_places(**files: Path | None) -> None:
    """Raise ConfigError where a file could not be written; to be called before anything is computed for it.

    The names say what the files are; None is one that was not asked for.
    """
    for what, path in files.items():
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(f"{path}: the {what} cannot be written there; give a file in a folder of your own")


def tell_written(*, json: bool, **files: Path | None) -> None:
    """Say of each file that was written where it is: `picture=PATH` is told as "picture written to PATH".

    On standard error where standard output is JSON. None is a file that was not asked for.
    """
    for what, path in files.items():
        if path is not None:
            print(f"{what} written to {path}", file=sys.stderr if json else sys.stdout)
