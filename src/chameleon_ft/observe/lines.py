"""Files of lines, each a JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from chameleon_ft.errors import ConfigError


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; none if it does not exist.

    Raises ConfigError if it cannot be read, and at a line that is not JSON, except for an unfinished last line, which a
    crash may leave.
    """
    for number, line in enumerate(raw_lines(path), start=1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            if line.endswith(b"\n"):
                raise ConfigError(f"{path}, line {number}: is not JSON; the file is damaged") from None


def readable_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; what is none is left out. Raises ConfigError if it cannot be read."""
    for line in raw_lines(path):
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


def raw_lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends; none if it does not exist. Raises ConfigError if it cannot be read.

    They are bytes: a last line may end within a character, and texts may have other characters that end lines.
    """
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
