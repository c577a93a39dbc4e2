"""Reads the lines that a run adds to its files.

A run that is watched from its directory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from chameleon_ft.errors import ConfigError
from chameleon_ft.report.view import RunReport, RunState
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.readable import parse_line
from chameleon_ft.storage.recorder import RecordLine

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


class RunWatcher:
    """Follows the files of a run, and reports its state.

    Attributes:
        run: the directory.
        clock: Unix seconds by which the age of records is counted; None: by the files, whose clock is the records'.
        state: as of the last call of `update`.
        damaged: messages about lines that `update_readable` has left out.
    """

    def __init__(self, run: RunDirectory, *, clock: Callable[[], float] | None = None) -> None:
        self.run = run
        self.state = RunState(run)
        self.damaged: list[str] = []
        self._follower = RunFollower(run)
        self._clock = clock

    def update(self) -> list[RecordLine]:
        """Take in the lines that the run has added, and return them. Raises ConfigError if one is damaged."""
        lines = self._follower.new_lines()
        for line in lines:
            self.state.add(line)
        return lines

    def update_readable(self) -> list[RecordLine]:
        """As `update`, but leave out the lines that cannot be read."""
        while True:
            try:
                return self.update()
            except ConfigError as error:
                self.damaged.append(str(error))

    def report(self) -> RunReport:
        """Return the state of the run now."""
        now = self._now() if self._clock is None else self._clock()
        return self.state.report(now, has_coordinator=self.has_coordinator())

    def _now(self) -> float:
        """Return Unix seconds by the clock of the records: the machine's may have been set since the run began."""
        changed = []
        for file in (self.run.metrics_file, self.run.events_file):
            with suppress(OSError):
                changed.append(file.stat().st_mtime)
        if not changed or self.state.latest is None:
            return time.time()
        return self.state.latest + max(0.0, time.time() - max(changed))

    def has_coordinator(self) -> bool | None:
        """Return whether a coordinator leads the run; None: not known here."""
        if not self.run.control_file.exists():
            return False
        try:
            return self.run.read_control().has_process_here()
        except ConfigError:  # of another user's run, for one
            return None
