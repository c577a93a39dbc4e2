"""Reads the lines that a run adds to its files."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any, Final, Literal

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.files import RunDirectory
from chameleon_ft.observe.readable import parse_line
from chameleon_ft.observe.recorder import RecordLine

_SETBACK_S: Final = 1.0  # a shorter one may be the difference of two hosts


class RunFollower:
    """Reads the metrics and events of a run from its beginning, and then what is added.

    The coordinator does not know of it, so it cannot delay the run. It works for a live run, also when another
    coordinator takes over, and for one that is over.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._files = {
            "metrics": _NewLines("metrics", run.metrics_file),
            "events": _NewLines("events", run.events_file),
        }
        self._setbacks_s: list[float] = []
        self._latest: dict[str, tuple[float, int]] = {}  # by file, with the number of setbacks before

    def new_lines(self) -> list[RecordLine]:
        """Return the lines since the last call, in the order in which they were written.

        Raises ConfigError at a line that cannot be read; the next call continues after it.
        """
        for file in self._files.values():
            file.read()
        lines: list[RecordLine] = [
            (name, self._without_setbacks(name, line)) for name, file in self._files.items() for line in file.take()
        ]
        return sorted(lines, key=lambda each: each[1]["time"])

    def _without_setbacks(self, name: str, line: dict[str, Any]) -> dict[str, Any]:
        """Return a line with its time as if no clock had been set back before it, as between two parts of a run.

        So each file keeps its order. A setback shows in both files, and best in the one whose lines are closer.
        """
        latest, count = self._latest.get(name, (-math.inf, 0))
        time = line["time"] + sum(self._setbacks_s[:count])
        if latest - time > _SETBACK_S:
            self._setbacks_s[count : count + 1] = [max([latest - time, *self._setbacks_s[count : count + 1]])]
            count += 1
            time = line["time"] + sum(self._setbacks_s[:count])
        time = max(time, latest)
        self._latest[name] = time, count
        return {**line, "time": time}


class _NewLines:
    """The complete lines that are appended to a file, which may be replaced by a copy of itself."""

    def __init__(self, kind: Literal["metrics", "events"], path: Path) -> None:
        self._kind = kind
        self._path = path
        self._read_bytes = 0
        self._number = 0
        self._is_unreadable = False  # and that was said
        self._unparsed: deque[bytes] = deque()  # all lines may be damaged, so what follows one is not read again
        self._lines: list[dict[str, Any]] = []

    def read(self) -> None:
        """Read what is new. Raises ConfigError at a damaged line; what precedes it is kept.

        Raises it once, too, if the file cannot be read; later calls try again.
        """
        self._unparsed.extend(self._new_content().splitlines(keepends=True))
        while self._unparsed:
            line = self._unparsed.popleft()
            self._number += 1
            try:
                self._lines.append(parse_line(self._kind, line))
            except ConfigError as error:
                raise ConfigError(f"{self._path}, line {self._number}: {error}") from None

    def _new_content(self) -> bytes:
        """Return the complete lines that were added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                content = file.read()
        except FileNotFoundError:
            return b""
        except OSError as error:
            if self._is_unreadable:
                return b""
            self._is_unreadable = True
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from None
        self._is_unreadable = False
        complete = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        return complete

    def take(self) -> list[dict[str, Any]]:
        """Return the lines that were read since the last call."""
        lines, self._lines = self._lines, []
        return lines
