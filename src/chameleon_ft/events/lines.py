"""The lines of `events.jsonl` and `metrics.jsonl` as values of their types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from chameleon_ft.errors import ConfigError, describe_invalid
from chameleon_ft.events import decisions, kinds, records
from chameleon_ft.events.base import Event, Time, UnknownEvent, events_in

_T = TypeVar("_T")

Record: TypeAlias = records.StepRecord | Event
"""One line of a file of the run."""

EVENT_TYPES: Final[Mapping[str, type[Event]]] = events_in(records) | events_in(decisions) | events_in(kinds)
"""All types of events by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    event: str
    time: Time
    message: str | None = None


def parse_step(line: bytes) -> records.StepRecord:
    """Return the step of a line of `metrics.jsonl`.

    Raises ConfigError if it is not JSON, or a field is missing or of a wrong type.
    """
    _from_json(line)
    return _validated(records.StepRecord, line)


def parse_event(line: bytes) -> Event:
    """Return the event of a line of `events.jsonl`. Raises as `parse_step`."""
    fields = _from_json(line)
    head = _validated(_Head, line)
    if (kind := EVENT_TYPES.get(head.event)) is not None:
        return _validated(kind, line)
    fields = {name: value for name, value in fields.items() if name not in ("time", "event", "message")}
    return UnknownEvent(time=head.time, message=head.message, kind=head.event, fields=fields)


def _from_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError("is not JSON; the file is damaged") from None


def _validated(kind: type[_T], line: bytes) -> _T:
    try:
        value: _T = _adapters[kind].validate_json(line, strict=True)
    except ValidationError as error:
        why = describe_invalid(error).removeprefix(": ")
        raise ConfigError(f"{why}; the file is damaged, or was written by another version of chameleon") from None
    return value


class _Adapters(dict[type, TypeAdapter[Any]]):
    """The adapter of each type; making one takes a while."""

    def __missing__(self, kind: type) -> TypeAdapter[Any]:
        return self.setdefault(kind, TypeAdapter(kind))


_adapters: Final = _Adapters()
