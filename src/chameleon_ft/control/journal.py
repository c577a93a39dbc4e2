"""The journal of a run: every change of its state, so that another coordinator can continue from the last one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self, TextIO

from pydantic_core import to_json

from chameleon_ft.control.events import Moment
from chameleon_ft.control.state.state import State
from chameleon_ft.errors import ControlError
from chameleon_ft.observe import RecordLine, open_for_appending, read_lines, replace_file

__all__ = ["Journal", "LastEntry"]

_LONGEST_BYTES: Final = 16 << 20
_OBSERVED: Final = frozenset({"ticked_at_s", "detectors"})


@dataclass(frozen=True, slots=True)
class LastEntry:
    """The end of a journal.

    Attributes:
        state: the last state.
        at: the time of the event that led to it.
        received: connection -> how many of its messages that state accounts for.
        records: the records of the last change, oldest first, which may not all have been written.
    """

    state: State
    at: Moment
    received: Mapping[int, int]
    records: Sequence[RecordLine]

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a journal; None if there is none, or nothing in it. Raises ControlError if it is damaged."""
        if not path.exists():
            return None
        state: dict[str, Any] = {}
        received: dict[int, int] = {}
        records: list[RecordLine] = []
        at = None
        try:
            for line in read_lines(path):
                state |= line["state"]
                received |= {int(connection): count for connection, count in line.get("received", {}).items()}
                # Those of the lines before were written before this one.
                records = [(file, fields) for file, fields in line.get("records", ())]
                at = Moment(*line["at"])
            return None if at is None else cls(State.from_json(json.dumps(state)), at, received, records)
        except (ValueError, KeyError, TypeError) as error:
            raise ControlError(
                f"{path}: the journal of the run cannot be read ({error}); begin with --resume"
            ) from None


class Journal(AbstractContextManager["Journal"]):
    """Appends to the journal of a run. A new one replaces the one before with its first line, the whole state.

    Args:
        path: of the file.
        longest_bytes: size from which on it begins anew, with the whole state.
    """

    def __init__(self, path: Path, *, longest_bytes: int = _LONGEST_BYTES) -> None:
        self._path = path
        self._longest_bytes = longest_bytes
        self._file: TextIO | None = None
        self._last: State | None = None
        self._received: dict[int, int] = {}
        self._unwritten: dict[int, int] = {}  # those of messages that have changed nothing since the last line

    def write(
        self, state: State, at: Moment, *, received: Mapping[int, int] | None = None, records: Sequence[RecordLine] = ()
    ) -> None:
        """Write what has changed since the last call, before the commands of the change are carried out.

        Changes of the clock and of what detectors have observed are written with the next one of anything else: every
        message of a worker leads to some, and another coordinator observes anew.
        """
        self._received |= received or {}
        self._unwritten |= received or {}
        if self._file is None or self._file.tell() > self._longest_bytes:
            self._last, self._unwritten = None, self._received
        changed = {
            field.name: getattr(state, field.name)
            for field in fields(State)
            if self._last is None or _differs(getattr(state, field.name), getattr(self._last, field.name))
        }
        if not (changed.keys() - _OBSERVED or records):
            return
        line: dict[str, Any] = {"at": (at.unix_s, at.monotonic_s), "state": changed}
        if self._unwritten:
            line["received"] = self._unwritten
        if records:
            line["records"] = records
        text = to_json(line, fallback=dict, inf_nan_mode="constants").decode() + "\n"
        if self._last is None or self._file is None:
            self._close()
            replace_file(self._path, text, mode=0o600)
            self._file = open_for_appending(self._path)
        else:
            self._file.write(text)
            self._file.flush()
        self._last, self._unwritten = state, {}

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def _differs(value: object, before: object) -> bool:
    return value is not before and value != before
