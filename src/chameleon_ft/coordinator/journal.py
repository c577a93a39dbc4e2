"""The journal of a run: the events of its state machine, so that another coordinator can continue from its last state.

The first line has a whole state, each other one an event that followed. `state_machine.step` is a pure function, so
whoever replays the events gets the state that the coordinator had, and the records that the last event led to. The
journal begins anew with the whole state before the events are so many that to replay them takes long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

import chameleon_ft
from chameleon_ft.coordinator import commands, events
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.coordinator.state_machine import step
from chameleon_ft.errors import ConfigError, ControlError, describe_invalid
from chameleon_ft.events.records import RunStatus
from chameleon_ft.plan.frames import plain
from chameleon_ft.protocol.messages import Committed, Hello
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import RunDirectory, read_lines
from chameleon_ft.storage.recorder import RecordLine, line_of

_FORMAT: Final = "chameleon-journal-3"
"""In the first line; to be counted up when a change of `State` or of the events gives lines another meaning."""
_MIN_BYTES: Final = 256 << 10
_PER_STATE: Final = 4
_but_clock = attrgetter(*(field.name for field in fields(State) if field.name != "ticked_at_s"))


@dataclass(frozen=True, slots=True)
class LastEntry:
    """The end of a journal.

    Attributes:
        state: the state after the last event.
        at: the time of that event.
        received: connection -> how many of its messages that state accounts for.
        records: the records of the last event, oldest first, which may not all have been written.
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
        """Read a journal and replay its events; None if there is none, or nothing in it.

        Raises ControlError if it is damaged, or was written by another version of Chameleon.
        """
        last: Self | None = None
        try:
            for line in read_lines(path) if path.exists() else ():
                last = cls.first(line) if last is None else last.after(line)
        except (ConfigError, ControlError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = str(error)
            if not isinstance(error, ConfigError):
                name = type(error).__name__
                why = describe_invalid(error) if isinstance(error, ValidationError) else f"{name}: {error}"
                why += "; it is damaged, or another version of chameleon wrote it"
            raise ControlError(f"{path}: the journal of the run cannot be read ({why}); begin with --resume") from None
        return last

    @classmethod
    def first(cls, line: Mapping[str, Any]) -> Self:
        """Read the first line of a journal."""
        if (found := line.get("format")) != _FORMAT:
            named = found or "an older one"
            raise ConfigError(f"its format is {named}, not {_FORMAT}: another version of chameleon wrote it")
        if (version := line.get("version")) != chameleon_ft.__version__:
            raise ConfigError(f"chameleon {version} wrote it, and this is {chameleon_ft.__version__}")
        state = State.from_json(json.dumps(line["state"]))
        return cls(state, events.Moment(**line["at"]), _counts(line), [])

    def after(self, line: Mapping[str, Any]) -> Self:
        """Replay another line."""
        last = replace(self, received={**self.received, **_counts(line)})
        if "type" not in line:
            return last
        event = read_event(line)
        state, orders = step(replace(self.state, ticked_at_s=line["ticked_at_s"]), event)
        # Those of the events before were written before this one.
        records = [line_of(order.record) for order in orders if isinstance(order, commands.Record)]
        return replace(last, state=state, at=event.at, records=records)


def _counts(line: Mapping[str, Any]) -> dict[int, int]:
    return {int(connection): count for connection, count in line.get("received", {}).items()}


def event_fields(event: events.Event) -> dict[str, object]:
    """Return the fields of a line that make an event, without what the state does not depend on; see `read_event`."""
    match event:
        case events.Received(message=Committed(times=times) as message) if times.channels:
            times = times.model_copy(update={"channels": ()})
            event = replace(event, message=message.model_copy(update={"times": times}))
    return {"type": type(event).__name__, "event": event}


def read_event(line: Mapping[str, Any]) -> events.Event:
    """Return the event of a line. Raises an error for any other line."""
    return _adapter(line["type"]).validate_python(line["event"])


@cache
def _adapter(name: str) -> TypeAdapter[events.Event]:
    return TypeAdapter(getattr(events, name))


class Journal:
    """Appends to the journal of a run. A new one replaces the one before with its first line, the whole state.

    While the disk is quick, an event is written when `write` returns, so that it is in the journal before the commands
    that follow from it are carried out. A disk that is full or does not answer must not stop training: then the
    commands do not wait, and the events are written once that is possible, or the whole state instead of too many of
    them. If the coordinator is lost meanwhile, another one continues from the last event that was written. It lacks
    changes that peers know:

    - A generation that ranks know and the journal does not: ranks say so when they return, see `Hello.known`, and give
      its plan back when they quiesce, see `Quiesced.spec`. Without the first plan, the run ends.
    - Messages of peers: they are sent again, because none is acknowledged that is not in the journal. Records that
      follow from them are made again.
    - A worker that is lost, and so does not return: it is found lost once more.
    - A worker that has joined: before the run begins, it joins again; later, it is turned away, and restarted if its
      agent may.
    - A request for a checkpoint: the next one has a number that none had before.
    - A switch to the next generation that has begun: ranks say so, see `Hello.switch_to`.

    Args:
        path: the file.
        files: writes it, in its order with all other files.
        min_bytes: of events, after which it may begin anew, once they are several times as long as the whole state.
    """

    def __init__(self, path: Path, files: FileQueue, *, min_bytes: int = _MIN_BYTES) -> None:
        self._path = path
        self._files = files
        self._min_bytes = self._max_bytes = min_bytes
        # The bytes of events since the whole state.
        self._num_bytes = 0
        # The numbers of operations on the file that may not be done.
        self._waiting: list[int] = []
        self._has_begun = False
        # Lines that are to be written with the next event that is due.
        self._pending: list[str] = []
        self._received: dict[int, int] = {}
        # The counts that are in no line yet.
        self._unwritten: dict[int, int] = {}

    def begin(self, state: State, at: events.Moment, *, received: Mapping[int, int] | None = None) -> None:
        """Begin anew with a whole state."""
        self._received |= received or {}
        self._begin(state, at, "")

    def write(
        self,
        event: events.Event,
        before: State,
        after: State,
        orders: Iterable[commands.Command],
        *,
        received: Mapping[int, int] | None = None,
    ) -> None:
        """Write an event, unless it has changed nothing but the clock and leads to no record.

        Unless it is due, it is written with the next one: nothing follows from it yet, and its message is not
        acknowledged. Each survivor of a loss reports, and all wait for the last report.

        Args:
            before: the state before the event; `after`: the one after it.
            orders: the commands that follow from the event.
            received: connection -> how many of its messages have been handled, this one included.
        """
        self._received |= received or {}
        self._unwritten |= received or {}
        line = ""
        if _but_clock(after) != _but_clock(before) or any(isinstance(order, commands.Record) for order in orders):
            line = self._line({"ticked_at_s": before.ticked_at_s, **event_fields(event)})
        if not self._has_begun or (self._num_bytes > self._max_bytes and line):
            self._begin(before, event.at, line)
        elif line:
            self._pending.append(line)
        if _is_due(event, after, orders):
            self._append()

    def flush(self, *, received: Mapping[int, int] | None = None) -> None:
        """Write what was not due, and the counts of messages that are no events."""
        self._received |= received or {}
        self._unwritten |= received or {}
        if self._unwritten:
            self._pending.append(self._line({}))
        self._append()

    def _line(self, content: dict[str, object]) -> str:
        """Return a line, with the counts of messages that are in none yet."""
        if self._unwritten:
            content |= {"received": self._unwritten}
            self._unwritten = {}
        return _as_line(content)

    def _begin(self, state: State, at: events.Moment, line: str) -> None:
        """Replace the journal by a state and the line of an event that follows it."""
        for number in self._waiting:
            self._files.cancel(number)
        received = dict(self._received)

        def text() -> str:
            first = {"format": _FORMAT, "version": chameleon_ft.__version__, "at": at, "state": state}
            whole = _as_line({**first, "received": received})
            self._max_bytes = max(self._min_bytes, _PER_STATE * len(whole))
            return whole + line

        self._has_begun, self._num_bytes, self._unwritten = True, len(line), {}
        # They have led to the state.
        self._pending.clear()
        self._waiting = [self._files.replace(self._path, text, mode=0o600)]
        self._note_written()

    def _append(self) -> None:
        if not self._pending:
            return
        text = "".join(self._pending)
        self._pending.clear()
        number = self._files.append(self._path, text)
        # Too much waits for the disk: the events that follow do not lead on from what it gets.
        if number is None:
            self._has_begun = False
            return
        self._waiting.append(number)
        self._num_bytes += len(text)
        self._note_written()

    def _note_written(self) -> None:
        if not self._files.is_late:
            self._waiting.clear()


def _as_line(content: Mapping[str, Any]) -> str:
    return to_json(content, fallback=plain, inf_nan_mode="constants").decode() + "\n"


def _is_due(event: events.Event, after: State, orders: Iterable[commands.Command]) -> bool:
    """Return whether an event is to be written before its orders are carried out.

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
