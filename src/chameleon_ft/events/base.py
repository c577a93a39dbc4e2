"""The base of all events, and the table of their types by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, dataclass_transform

from pydantic import Field

_MAX: Final = 1e15

Count: TypeAlias = Annotated[int, Field(ge=0, le=int(_MAX))]
"""A number of a worker, a step or a generation, or of things that are counted."""
Positive: TypeAlias = Annotated[int, Field(ge=1, le=int(_MAX))]
Number: TypeAlias = Annotated[float, Field(ge=-_MAX, le=_MAX)]
"""A number that can be written out."""
Ratio: TypeAlias = Annotated[float, Field(gt=0, le=_MAX)]
Time: TypeAlias = Annotated[float, Field(ge=0, le=1e11)]
"""Unix seconds, as far as the calendar goes."""
Workers: TypeAlias = tuple[Count, ...]
Link: TypeAlias = tuple[Count, Count]
"""The two workers of a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of `events.jsonl`.

    Attributes:
        time: Unix seconds at which the recorder wrote the line; 0 before.
        message: the event in one sentence, if the terminal shows it.
    """

    time: Time = 0.0
    message: str | None = None

    @property
    def name(self) -> str:
        """The name of the event in the file."""
        return _NAMES[type(self)]

    def values(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the time; the message is the last one, if there is one."""
        values = dataclasses.asdict(self)
        del values["time"]
        message = values.pop("message")
        return values if message is None else {**values, "message": message}

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return {"time": self.time, "event": self.name, **self.values()}


_Event = TypeVar("_Event", bound=Event)
_NAMES: Final[dict[type[Event], str]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def event(name: str) -> Callable[[type[_Event]], type[_Event]]:
    """Return a class decorator that makes a type of event, whose lines have this name."""

    def register(cls: type[_Event]) -> type[_Event]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        _NAMES[made] = name
        return made

    return register


def events_in(module: ModuleType) -> dict[str, type[Event]]:
    """Return the types of events that a module defines, by name."""
    return {name: kind for kind, name in _NAMES.items() if kind.__module__ == module.__name__}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent(Event):
    """An event of another version of chameleon, with the fields of its line but for its time and message."""

    kind: str
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """See `Event`."""
        return self.kind

    def values(self) -> dict[str, Any]:
        """See `Event`."""
        return {**self.fields} if self.message is None else {**self.fields, "message": self.message}
