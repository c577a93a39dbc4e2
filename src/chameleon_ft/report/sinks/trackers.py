"""Trackers of experiments, such as Weights & Biases: each has one run for a run here, however often that is tracked."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import Evaluation, FailureRecord, StepRecord
from chameleon_ft.report.sinks.sink import scalars_of
from chameleon_ft.report.story import Notice, notices_of
from chameleon_ft.storage.files import RunDirectory, replace_file

_SAVED_EVERY_S: Final = 1.0
_OF_A_STEP: Final = StepRecord, Evaluation


class Tracker(Protocol):
    """A run of a tracker; its methods may raise anything."""

    def log(self, scalars: Mapping[str, float], *, step: int, time_s: float) -> None:
        """Add values at a training step, to which `time_s` belongs, in Unix seconds."""

    def tell(self, notice: Notice, *, step: int, time_s: float, is_alert: bool) -> None:
        """Add what the terminal prints at a training step."""

    def close(self) -> None:
        """Send all that waits; nothing follows."""


class Delivered:
    """The records of a run that a tracker has, noted in the run directory, so that another process continues there.

    Attributes:
        id: The name of the run for the tracker.
    """

    def __init__(self, run: RunDirectory, tool: str, place: str) -> None:
        self._path: Path = run.path / "trackers.json"
        self._key = f"{tool} {place}"
        known = self._entries().get(self._key, {"id": uuid.uuid4().hex})
        self.id: str = known["id"]
        # By type, the step of the newest record, or its time if a step may have several.
        self._newest: dict[str, float] = known.get("newest", {})
        # Two records of one time are two, but those of an earlier process are told apart by times alone.
        self._before = dict(self._newest)
        self._saved_s = -math.inf

    def lacks(self, record: Record) -> bool:
        """Return whether the tracker does not have a record, nor, of a step or an evaluation, one of the same step."""
        newest = self._newest if isinstance(record, _OF_A_STEP) else self._before
        return _number(record) > newest.get(type(record).__name__, -math.inf)

    def add(self, record: Record) -> None:
        """Note that the tracker has a record."""
        self._newest[type(record).__name__] = _number(record)
        if time.monotonic() - self._saved_s > _SAVED_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file."""
        entries = self._entries() | {self._key: {"id": self.id, "newest": self._newest}}
        replace_file(self._path, json.dumps(entries, indent=1) + "\n", mode=0o644)
        self._saved_s = time.monotonic()

    def _entries(self) -> dict[str, Any]:
        try:
            entries: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return entries


def _number(record: Record) -> float:
    """Return what a newer record has more of."""
    return record.step if isinstance(record, _OF_A_STEP) else record.time


class TrackerSink:
    """Logs the scalars of records over the training step, and what the terminal prints, once each.

    Trackers cannot replace a value, so a step that is trained again keeps its first values, as does its evaluation.
    """

    def __init__(self, tracker: Tracker, delivered: Delivered) -> None:
        self._tracker = tracker
        self._delivered = delivered
        self._step = 0

    def take(self, record: Record) -> bool:
        """See `Sink`."""
        if isinstance(record, _OF_A_STEP):
            self._step = record.step
        if not self._delivered.lacks(record):
            return False
        if scalars := scalars_of(record):
            self._tracker.log(scalars, step=self._step, time_s=record.time)
        for notice in notices_of(record):
            is_alert = isinstance(record, FailureRecord)
            self._tracker.tell(notice, step=self._step, time_s=record.time, is_alert=is_alert)
        self._delivered.add(record)
        return bool(scalars)

    def close(self) -> None:
        """See `Sink`."""
        try:
            self._tracker.close()
        finally:
            self._delivered.save()


def facts_of(notice: Notice) -> str:
    """Return the facts of a notice, one a line."""
    return "\n".join(f"{name}: {value}" for name, value in notice.facts)
