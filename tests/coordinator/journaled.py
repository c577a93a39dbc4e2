"""The journal of a history, read and replayed after every event."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from chameleon_ft.coordinator.commands import Command, Record
from chameleon_ft.coordinator.events import Event
from chameleon_ft.coordinator.journal import Journal, LastEntry
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.recorder import line_of


def but_clock(state: State) -> State:
    """A state without the time of the last tick, which is written with the next event alone."""
    return replace(state, ticked_at_s=None)


class Lines:
    """In place of a `FileQueue`: the lines of one file, in memory."""

    is_late = False

    def __init__(self) -> None:
        self.text = ""
        self.wholes = 0
        """How often the file was replaced."""

    def append(self, path: Path, text: str) -> int:
        self.text += text
        return 0

    def replace(self, path: Path, text: Callable[[], str], *, mode: int) -> int:
        self.text = text()
        self.wholes += 1
        return 0

    def cancel(self, number: int) -> None: ...

    def replayed(self, last: LastEntry | None = None) -> LastEntry:
        """Return the entry that the lines lead to, from the one that was read before."""
        for line in self.text.splitlines():
            fields = json.loads(line)
            last = LastEntry.first(fields) if last is None else last.after(fields)
        assert last is not None
        return last


class Replayed:
    """Journals each event of a history, and checks that a replay leads to the same states and records."""

    def __init__(self, *, min_bytes: int = 1 << 16) -> None:
        self._files = Lines()
        self._journal = Journal(Path("journal.jsonl"), cast(FileQueue, self._files), min_bytes=min_bytes)
        self._after: State | None = None
        self.last: LastEntry | None = None
        self.lines: list[str] = []
        """Of the events so far."""

    def happen(self, event: Event, before: State, after: State, commands: Sequence[Command]) -> None:
        """Write an event and read it."""
        if before is not self._after:  # a coordinator has taken over, from this state
            self._journal.begin(before, event.at)
            self._read()
        self._after = after
        self._journal.write(event, before, after, commands)
        self._journal.flush()
        self._read()
        assert self.last is not None
        assert but_clock(self.last.state) == but_clock(after)
        records = [line_of(command.record) for command in commands if isinstance(command, Record)]
        if records:
            assert _plain(self.last.records) == _plain(records)

    def _read(self) -> None:
        if self._files.wholes:
            self._files.wholes, self.last = 0, None
        self.lines += self._files.text.splitlines()
        self.last = self._files.replayed(self.last)
        self._files.text = ""


def _plain(records: object) -> object:
    return json.loads(json.dumps(records, default=dict))
