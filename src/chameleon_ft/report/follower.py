"""Follows the files of a run, also of a live one, and keeps its view up to date."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.events.lines import Record, parse_event, parse_step
from chameleon_ft.report.view import RunReport, RunView
from chameleon_ft.storage.files import RunDirectory

# A shorter one may be the difference of two hosts.
_SETBACK_S: Final = 1.0


class RunFollower:
    """Reads the metrics and events of a run from its beginning, and then what is added.

    The coordinator does not know of it, so it cannot delay the run. It works for a live run, also when another
    coordinator takes over, and for one that is over.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._files = _NewLines(run.metrics_file, parse_step), _NewLines(run.events_file, parse_event)
        self._setbacks_s: list[float] = []

    def new_records(self) -> list[Record]:
        """Return the records since the last call, in the order in which they were written.

        Raises ConfigError at a line that cannot be read; the next call continues after it.
        """
        for file in self._files:
            file.read()
        records = [self._without_setbacks(file, record) for file in self._files for record in file.take()]
        return sorted(records, key=lambda record: record.time)

    def _without_setbacks(self, file: _NewLines, record: Record) -> Record:
        """Return a record with its time as if no clock had been set back before it, as between two parts of a run.

        So each file keeps its order. A setback shows in both files, and best in the one whose lines are closer.
        """
        latest, count = file.latest, file.num_setbacks
        time = record.time + sum(self._setbacks_s[:count])
        if latest - time > _SETBACK_S:
            self._setbacks_s[count : count + 1] = [max([latest - time, *self._setbacks_s[count : count + 1]])]
            count += 1
            time = record.time + sum(self._setbacks_s[:count])
        file.latest, file.num_setbacks = max(time, latest), count
        return record if record.time == file.latest else replace(record, time=file.latest)


class _NewLines:
    """The records that are appended to a file, which may be replaced by a copy of itself.

    Attributes:
        latest: Time of the newest record, without setbacks of the clock.
        num_setbacks: Setbacks of the clock before that record.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Record]) -> None:
        self._parse = parse
        self._path = path
        self._read_bytes = 0
        self._number = 0
        self._is_reported_unreadable = False
        # All lines may be damaged, so what follows one is not read again.
        self._unparsed: deque[bytes] = deque()
        self._records: list[Record] = []
        self.latest = -math.inf
        self.num_setbacks = 0

    def read(self) -> None:
        """Read what is new. Raises ConfigError at a damaged line; what precedes it is kept.

        Raises it once, too, if the file cannot be read; later calls try again.
        """
        self._unparsed.extend(self._new_content().splitlines(keepends=True))
        while self._unparsed:
            line = self._unparsed.popleft()
            self._number += 1
            try:
                self._records.append(self._parse(line))
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
            if self._is_reported_unreadable:
                return b""
            self._is_reported_unreadable = True
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from None
        self._is_reported_unreadable = False
        complete = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        return complete

    def take(self) -> list[Record]:
        """Return the records that were read since the last call."""
        records, self._records = self._records, []
        return records


class RunWatcher:
    """Follows the files of a run, and keeps its view up to date.

    Attributes:
        run: The directory.
        clock: Unix seconds by which the age of records is counted; None: by the files, whose clock is the records'.
        view: As of the last call of `update`.
        damaged: Messages about lines that `update_readable` has left out.
    """

    def __init__(self, run: RunDirectory, *, clock: Callable[[], float] | None = None) -> None:
        self.run = run
        self.view = RunView(run)
        self.damaged: list[str] = []
        self._follower = RunFollower(run)
        self._clock = clock

    def update(self) -> list[Record]:
        """Take in the records that the run has added, and return them. Raises ConfigError if a line is damaged."""
        records = self._follower.new_records()
        for record in records:
            self.view.add(record)
        return records

    def update_readable(self) -> list[Record]:
        """As `update`, but leave out the lines that cannot be read."""
        while True:
            try:
                return self.update()
            except ConfigError as error:
                self.damaged.append(str(error))

    def report(self) -> RunReport:
        """Return the state of the run now."""
        now = self._now() if self._clock is None else self._clock()
        return self.view.report(now, has_coordinator=self.has_coordinator())

    def _now(self) -> float:
        """Return Unix seconds by the clock of the records: the machine's may have been set since the run began."""
        changed = []
        for file in (self.run.metrics_file, self.run.events_file):
            with suppress(OSError):
                changed.append(file.stat().st_mtime)
        if not changed or self.view.latest is None:
            return time.time()
        return self.view.latest + max(0.0, time.time() - max(changed))

    def has_coordinator(self) -> bool | None:
        """Return whether a coordinator leads the run; None: not known here."""
        if not self.run.control_file.exists():
            return False
        try:
            return self.run.read_control().has_process_here()
        # For one, it is the run of another user.
        except ConfigError:
            return None
