"""Following and ending a run while it trains, from outside."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Tail:
    """Yields the lines of a file while it is being written."""

    path: Path
    _rest: bytes = b""
    _offset: int = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that have been completed since the last call; none if there is no file yet."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            read = file.read()
            self._offset += len(read)
            *lines, self._rest = (self._rest + read).split(b"\n")
            yield from map(json.loads, lines)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run at once, as a second Ctrl-C does."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
