"""The journal of a run: every change of its state, so that another coordinator can continue from the last one.

Differences between two states of a run, as JSON values.

A patch is one of

    [value]           the new value
    number            the part with this number
    {name: patch}     patches of fields or of the keys of a mapping, the others stay; null removes a key

Parts are large values that a state has in several places, and keeps when it moves them to another place: plans with
their owners and keepers, and what remains of a step. Each is written once, as the patch that makes it of nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import chain, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError
from pydantic_core import to_json

from chameleon_ft.coordinator import commands, events
from chameleon_ft.coordinator.state.active_plan import ActivePlan
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.errors import ConfigError, ControlError, describe_invalid
from chameleon_ft.events.records import RunStatus
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.plan.snapshots import SnapshotLayout
from chameleon_ft.protocol.messages import Hello
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import RunDirectory, read_lines
from chameleon_ft.storage.recorder import RecordLine

_PARTS: Final = frozenset({ActivePlan, Plan, RestOfStep, Sharding, SnapshotLayout})
_KEPT: Final = 64  # parts that can be referred to; a state has fewer
_NOTHING: Final = object()  # where there was no value


class PatchWriter:
    """Makes patches, and numbers the parts that they refer to."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, object]] = {}  # id -> number, and the part, which must not be freed
        self._count = 0
        self._new: dict[int, Any] = {}

    def patch(self, value: object, before: object = _NOTHING) -> Any:
        """Return the patch that makes `value` of `before`; None if they are equal."""
        if value is before:
            return None
        kind = type(value)
        if kind in _PARTS:
            return None if value == before else self._number(value)
        if is_dataclass(kind) and (before is None or before is _NOTHING or type(before) is kind):
            return self._of_fields(kind, value, before)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            return self._of_keys(value, before)
        return None if value == before else [value]

    def new_parts(self) -> dict[int, Any]:
        """Return the parts that patches refer to for the first time since the last call, in the order to read them."""
        new, self._new = self._new, {}
        return new

    def _of_fields(self, kind: type, value: object, before: object) -> Any:
        names = _names(kind)
        if type(before) is not kind:
            return {name: self.patch(getattr(value, name)) for name in names}
        patches = ((name, self.patch(getattr(value, name), getattr(before, name))) for name in names)
        return {name: patch for name, patch in patches if patch is not None} or None

    def _of_keys(self, value: Mapping[Any, object], before: Mapping[Any, object]) -> Any:
        if (changed := _changed_keys(value, before)) is not None:
            patches = ((key, self.patch(value[key], before[key])) for key in changed)
            return {key: patch for key, patch in patches if patch is not None} or None
        keys, known = [*value], [*before]
        left = known if keys[: len(known)] == known else [key for key in known if key in value]
        if keys[: len(left)] != left:
            return [value]  # a patch does not change the order of keys
        olds = before.values() if left is known else [before[key] for key in left]
        pairs = zip(keys, value.values(), chain(olds, repeat(_NOTHING)), strict=False)
        # Most values of thousands are the same objects.
        patches = ((key, self.patch(own, old)) for key, own, old in pairs if own is not old)
        found: dict[Any, Any] = {key: patch for key, patch in patches if patch is not None}
        if len(left) < len(known):
            found |= dict.fromkeys(key for key in known if key not in value)
        return found or None

    def _number(self, part: object) -> int:
        known = self._numbers.get(id(part))
        if known is not None:
            return known[0]
        content = self._of_fields(type(part), part, _NOTHING)
        number = self._count = self._count + 1
        self._numbers[id(part)] = number, part
        while len(self._numbers) > _KEPT:
            del self._numbers[next(iter(self._numbers))]
        self._new[number] = content
        return number


def _changed_keys(value: Mapping[Any, object], before: Mapping[Any, object]) -> Collection[Any] | None:
    """Return the keys whose values may differ, if maps know that without a comparison."""
    if isinstance(value, FrozenMap) and isinstance(before, FrozenMap):
        return value.changed_since(before)
    return None


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def read_parts(new: Mapping[str, Any], parts: dict[int, Any]) -> None:
    """Add the parts of a line, as `PatchWriter.new_parts` returned them, to those of the lines before."""
    for number, content in new.items():
        parts[int(number)] = patched(None, content, parts)


def patched(value: Any, patch: Any, parts: Mapping[int, Any]) -> Any:
    """Apply a patch to a JSON value. Raises ValueError or KeyError for one that `PatchWriter` does not make."""
    match patch:
        case [new]:
            return new
        case int():
            return parts[patch]
        case dict():
            found = dict(value) if isinstance(value, dict) else {}
            for name, own in patch.items():
                if own is None:
                    del found[name]
                else:
                    found[name] = patched(found.get(name), own, parts)
            return found
    raise ValueError(f"not a difference of states: {str(patch)[:80]}")


_FORMAT: Final = "chameleon-journal-1"
"""In the first line; to be counted up when a change of `State` or of `patches` gives lines another meaning."""
_LONGEST_BYTES: Final = 16 << 20
_OBSERVED: Final = frozenset({"ticked_at_s", "detectors"})
_journaled = attrgetter(*(field.name for field in fields(State) if field.name not in _OBSERVED))


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
    at: events.Moment
    received: Mapping[int, int]
    records: Sequence[RecordLine]

    @classmethod
    def newest(cls, run: RunDirectory) -> Self | None:
        """Read the newest journal of a run; None if there is none. Raises as `read`."""
        journals = run.journals()
        return cls.read(journals[-1]) if journals else None

    @property
    def status(self) -> RunStatus | None:
        """How the run has ended; None if it has not."""
        return None if self.state.ended is None else self.state.ended[0]

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a journal; None if there is none, or nothing in it.

        Raises ControlError if it is damaged, or was written by another version of Chameleon.
        """
        if not path.exists():
            return None
        state: Any = None
        parts: dict[int, Any] = {}
        received: dict[int, int] = {}
        records: list[RecordLine] = []
        at = None
        try:
            for line in read_lines(path):
                if at is None and (found := line.get("format")) != _FORMAT:
                    named = found or "an older one"
                    raise ConfigError(f"its format is {named}, not {_FORMAT}: another version of chameleon wrote it")
                read_parts(line.get("parts", {}), parts)
                state = patched(state, line["state"], parts)
                received |= {int(connection): count for connection, count in line.get("received", {}).items()}
                # Those of the lines before were written before this one.
                records = [(file, fields) for file, fields in line.get("records", ())]
                at = events.Moment(*line["at"])
            return None if at is None else cls(State.from_json(json.dumps(state)), at, received, records)
        except (ConfigError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = _describe(error)
            raise ControlError(f"{path}: the journal of the run cannot be read ({why}); begin with --resume") from None


def _describe(error: Exception) -> str:
    """Return why a journal cannot be read."""
    if isinstance(error, ConfigError):
        return str(error)
    why = describe_invalid(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
    return f"{why}; it is damaged, or another version of chameleon wrote it"


class Journal:
    """Appends to the journal of a run. A new one replaces the one before with its first line, the whole state.

    Any other line has what differs from the state of the line before, see `patches`: its length is that of the change.

    While the disk is quick, a change is written when `write` returns, so that it is in the journal before the commands
    of the change are carried out. A disk that is full or does not answer must not stop training: then the commands do
    not wait, and the changes are written once that is possible, or the whole state instead of too many of them. If the
    coordinator is lost meanwhile, another one continues from the last state that was written. It lacks changes that
    peers know:

    - A generation that ranks know and the journal does not: ranks say so when they return, see `Hello.known`, and give
      its plan back when they quiesce, see `Quiesced.plan`. Without the first plan, the run ends.
    - Messages of peers: they are sent again, because none is acknowledged that is not in the journal. Records that
      follow from them are made again.
    - A worker that is lost, and so does not return: it is found lost once more.
    - A worker that has joined: before the run begins, it joins again; later, it is turned away, and restarted if its
      agent may.
    - A request for a checkpoint: the next one has a number that none had before.
    - A switch to the next generation that has begun: ranks say so, see `Hello.switch_to`.

    Args:
        path: of the file.
        files: writes it, in its order with all other files.
        longest_bytes: of changes, after which it begins anew with the whole state.
    """

    def __init__(self, path: Path, files: FileQueue, *, longest_bytes: int = _LONGEST_BYTES) -> None:
        self._path = path
        self._files = files
        self._longest_bytes = longest_bytes
        self._num_bytes = 0  # of changes since the whole state
        self._waiting: list[int] = []  # numbers of the operations on it that may not be done
        self._last: State | None = None
        self._patches = PatchWriter()
        self._received: dict[int, int] = {}
        self._unwritten: dict[int, int] = {}  # those of messages that have changed nothing since the last line

    def write(
        self,
        state: State,
        at: events.Moment,
        *,
        received: Mapping[int, int] | None = None,
        records: Sequence[RecordLine] = (),
        is_due: bool = True,
    ) -> None:
        """Write what has changed since the last line.

        Unless it `is_due`, a change may be written with the next one: nothing follows from it yet, and its message is
        not acknowledged. Each survivor of a loss reports, and all wait for the last report. See the function `is_due`.

        Changes of the clock and of what detectors have observed are written with the next one of anything else: every
        message of a worker leads to some, and another coordinator makes its own observations.
        """
        self._received |= received or {}
        self._unwritten |= received or {}
        last = self._last
        if last is not None and not records and (not is_due or _journaled(state) == _journaled(last)):
            return
        is_whole = last is None or self._num_bytes > self._longest_bytes
        if is_whole:
            self._patches, last = PatchWriter(), None
        line: dict[str, Any] = {"format": _FORMAT} if is_whole else {}
        line |= {"at": (at.unix_s, at.monotonic_s), "state": self._patches.patch(state, last) or {}}
        if parts := self._patches.new_parts():
            line["parts"] = parts
        if noted := self._received if is_whole else self._unwritten:
            line["received"] = dict(noted)
        if records:
            line["records"] = records
        self._last, self._unwritten = state, {}
        if is_whole:
            self._begin_anew(line)
        else:
            self._append(_line(line))
        if not self._files.is_late:
            self._waiting.clear()

    def _begin_anew(self, line: Mapping[str, Any]) -> None:
        for number in self._waiting:
            self._files.cancel(number)
        self._waiting, self._num_bytes = [self._files.replace(self._path, lambda: _line(line), mode=0o600)], 0

    def _append(self, text: str) -> None:
        number = self._files.append(self._path, text)
        if number is None:  # too much waits for the disk: the changes that follow do not lead on from what it gets
            self._last = None
            return
        self._waiting.append(number)
        self._num_bytes += len(text)


def _line(content: Mapping[str, Any]) -> str:
    return to_json(content, fallback=dict, inf_nan_mode="constants").decode() + "\n"


def is_due(event: events.Event, after: State, orders: Iterable[commands.Command]) -> bool:
    """Return whether the change by an event is to be written before its orders are carried out.

    Of what is only measured, nothing follows outside this process. A rank that says hello for the first time, before
    the run begins, would be new to another coordinator, too: each of thousands need not wait for the disk.
    """
    harmless: tuple[type[commands.Command], ...] = (commands.MeasureOperations,)
    match event:
        case events.Ticked():
            return True
        case events.Received(message=Hello(resumes=None)) if after.phase is Phase.GATHERING:
            harmless = commands.Acknowledge, commands.Welcome
    return any(not isinstance(order, harmless) for order in orders)
