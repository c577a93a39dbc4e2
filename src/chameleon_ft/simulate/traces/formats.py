"""The formats of failure traces; see docs/traces.md."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from chameleon_ft.errors import ConfigError, describe_invalid
from chameleon_ft.simulate.traces.trace import Event, EventKind, Fault, Trace, first_misfit

RESOLUTION_S: Final = 8.64
"""Seconds in the last digit of a time in the InfiniteHBD trace, 0.0001 days: duration of a fault that ends at the time
it starts."""

_DAY_S: Final = 86_400.0
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]


def parse_trace(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace that `text` is, in the format that its first line shows.

    Args:
        text: The whole trace.
        nodes: How many nodes the trace was measured on, for a format that names only the nodes that failed; None if
            these are all.
        source: The name of the text in messages.

    Raises:
        ConfigError: the text cannot be read; names the line or the list element, and the reason.
    """
    if nodes is not None and nodes < 1:
        raise ConfigError(f"{source}: it cannot have been measured on {nodes} nodes; give 1 or more")
    text = text.removeprefix("\ufeff")
    start = text.lstrip()[:200]
    if not start:
        raise ConfigError(f"{source} is empty; give a trace in one of the formats of docs/traces.md")
    if start.startswith("["):
        return _parse_infinitehbd(text, nodes, source)
    first = start.splitlines()[0]
    if start.startswith("{"):
        trace = _parse_jsonl(text, source)
    elif re.search(r",\s*(add|remove)\s*,", first):
        trace = _parse_membership(text, source)
    else:
        raise ConfigError(
            f"{source}, line 1: {first[:60]!r} begins none of the formats that are known: a JSON list of fault_start "
            "and fault_end, lines of `milliseconds,add|remove,node`, or Chameleon's own JSON lines; see docs/traces.md"
        )
    if nodes not in (None, trace.hosts):
        raise ConfigError(
            f"{source} names all of its hosts, {trace.hosts}, so it is not of {nodes}: "
            f"take at most {trace.hosts}, or generate a larger one"
        )
    return trace


def load_trace(path: Path, *, nodes: int | None = None) -> Trace:
    """Read a trace in any of the formats; see `parse_trace`.

    Raises:
        ConfigError: the file cannot be read, or not as a trace.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: is not UTF-8 text, at byte {error.start}") from None
    return parse_trace(text, nodes=nodes, source=f"trace {path}")


def load_trace_for(path: Path, *, hosts: int, workers_per_host: int, nodes: int | None = None) -> Trace:
    """Read a trace for a cluster of `hosts` hosts with `workers_per_host` workers on each.

    Of a trace with more hosts the first ones are taken. A trace that names only the nodes that failed, and fewer than
    `hosts`, counts as measured on `hosts` nodes unless `nodes` gives another number.

    Raises:
        ConfigError: the file cannot be read or has too few hosts; see `parse_trace` and `Trace.on_hosts`.
    """
    trace = load_trace(path, nodes=nodes)
    if nodes is None and trace.hosts < hosts:
        trace = load_trace(path, nodes=hosts)
    return trace.on_hosts(hosts, workers_per_host=workers_per_host)


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace in Chameleon's own format. Raises ConfigError if the file exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(trace_to_jsonl(trace))
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; give another name for the trace") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


class _Read(BaseModel):
    """An object of a trace. Values are of the declared type, and no others are known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _require_object(cls, value: object) -> object:
        if not isinstance(value, dict):
            raise PydanticCustomError("no_object", f"must be an object with {', '.join(cls.model_fields)}")
        return value


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    """Raise errors of reading as ConfigError with their place."""
    try:
        yield
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ConfigError(f"{place}: is not JSON: {error.msg} at {line}column {error.colno}") from None
    except ValidationError as error:
        raise ConfigError(f"{place}: {describe_invalid(error)}") from None
    except (ValueError, OverflowError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _read_json(text: str) -> Any:
    """Read JSON. Raises ValueError also for a member that is there twice, and for NaN and Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
        return found

    def no_number(constant: str) -> float:
        raise ValueError(f"{constant} is not a number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=no_number)


class _Header(_Read):
    """The first line of Chameleon's own format: JSON lines, one for the trace and then one for each event."""

    chameleon_trace: Literal[1] = 1
    workers: int
    workers_per_host: int = 1
    duration_s: _Number
    name: str = ""


class _EventLine(_Read):
    time_s: _Number
    kind: EventKind
    workers: list[int]
    speed: _Number | None = None
    cause: str = ""

    def event(self) -> Event:
        if self.kind == "slow" and self.speed is None:
            raise ValueError("speed is missing; a slow event needs it")
        speed = 1.0 if self.speed is None else self.speed
        return Event(self.time_s, tuple(self.workers), self.kind, speed, self.cause)


def _parse_jsonl(text: str, source: str) -> Trace:
    """Return the trace that `trace_to_jsonl` wrote as `text`."""
    first, *lines = text.rstrip().split("\n")
    with _errors_at(f"{source}, line 1"):
        value = _read_json(first)
        if isinstance(value, dict) and "chameleon_trace" not in value:
            raise ValueError("chameleon_trace is missing: 1, the version of the format")
        header = _Header.model_validate(value)
        empty = Trace(header.workers, header.duration_s, (), header.workers_per_host, header.name)
    events = []
    for number, line in enumerate(lines, start=2):
        with _errors_at(f"{source}, line {number}"):
            events.append(_EventLine.model_validate(_read_json(line)).event())
    if misfit := first_misfit(events, empty.workers, empty.duration_s):
        index, reason = misfit
        raise ConfigError(f"{source}, line {index + 2}, {reason}")
    return Trace(empty.workers, empty.duration_s, tuple(events), empty.workers_per_host, empty.name)


def trace_to_jsonl(trace: Trace) -> str:
    """Return the trace in Chameleon's own format, from which `parse_trace` returns an equal trace."""
    header = _Header(
        workers=trace.workers, workers_per_host=trace.workers_per_host, duration_s=trace.duration_s, name=trace.name
    )
    lines = [json.dumps(header.model_dump())]
    for event in trace.events:
        line = {"time_s": event.time_s, "kind": event.kind, "workers": event.workers}
        line |= {"speed": event.speed} if event.kind == "slow" else {}
        lines.append(json.dumps(line | ({"cause": event.cause} if event.cause else {})))
    return "".join(line + "\n" for line in lines)


class _Cause(_Read):
    model_config = ConfigDict(extra="ignore")
    Level: Any
    Class: _Text
    Desc: _Text


class _Element(_Read):
    """A start or an end of a fault in an InfiniteHBD trace, which is a JSON list of them."""

    model_config = ConfigDict(extra="ignore")
    node_id: _Text
    event_time: _Number
    event_type: Literal["fault_start", "fault_end"]
    fault_type: _Cause

    @property
    def key(self) -> tuple[str, float, bool, str]:
        """The node, the seconds, whether a fault ends, and its cause: two elements are equal if these are."""
        cause = f"{self.fault_type.Class}: {self.fault_type.Desc}"
        return self.node_id, self.event_time * _DAY_S, self.event_type == "fault_end", cause


def _parse_infinitehbd(text: str, nodes: int | None, source: str) -> Trace:
    """Return the trace with a worker for each of `nodes` nodes, or of the nodes that are named.

    Nodes are numbered in the order of their names. Nodes that are not named never failed; they lie evenly in between,
    so that any part of the nodes has its share of faults. A node is back when all of its faults have ended. The trace
    ends with the last time in the list, which may be in any order.
    """
    with _errors_at(source):
        values = _read_json(text)
    places: dict[tuple[str, float, bool, str], str] = {}
    for number, value in enumerate(values, start=1):
        place = f"{source}, element {number}"
        with _errors_at(place):
            key = _Element.model_validate(value).key
            if key in places:
                raise ValueError(f"is the same as {places[key]}; leave out one of them")
        places[key] = place
    if not places:
        raise ConfigError(f"{source} has no element, so it names no node; give one with faults")
    names = sorted({node for node, *_ in places})
    if nodes is not None and nodes < len(names):
        raise ConfigError(f"{source} names {len(names)} nodes; it cannot have been measured on {nodes}")
    count = nodes or len(names)
    numbers = {name: index * count // len(names) for index, name in enumerate(names)}
    duration_s = max(time_s for _, time_s, _, _ in places)
    if duration_s == 0:
        raise ConfigError(f"{source} ends at time 0; give one that lasts")
    faults: list[Fault] = []
    # An end belongs to a start of its node: the first of its cause or, failing that, the first.
    open_starts: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for node, time_s, ends, cause in sorted(places, key=lambda key: (key[1], key[2])):
        starts = open_starts[node]
        if not ends:
            starts.append((time_s, cause))
            continue
        if not starts:
            raise ConfigError(
                f"{places[node, time_s, ends, cause]}: node {node} has no fault that could end at that time; "
                "leave the element out, or add the fault_start"
            )
        start = next((start for start in starts if start[1] == cause), starts[0])
        starts.remove(start)
        faults.append(Fault((numbers[node],), start[0], max(time_s, start[0] + RESOLUTION_S), cause=start[1]))
    for node, starts in open_starts.items():
        faults += (Fault((numbers[node],), start_s, cause=cause) for start_s, cause in starts)
    return Trace.from_faults(faults, workers=count, duration_s=duration_s, name="InfiniteHBD")


def _parse_membership(text: str, source: str) -> Trace:
    """Return the trace of a Bamboo log, in which nodes join and leave: lines of `milliseconds,add|remove,node`.

    A worker stands for each place in the cluster: as many as there are nodes at once. A node that joins takes the place
    that has been free for longest, whatever its name; a place that is left at the same moment does not count as free. A
    place that is first taken after time 0 is lost until then. A node that leaves without having joined was there from
    the start. The trace ends with the last line. The lines may be in any order.
    """
    places = ((line, f"{source}, line {number}") for number, line in enumerate(text.split("\n"), start=1))
    lines = [(*_membership(line, place), place) for line, place in places if line.strip()]
    lines.sort(key=lambda line: line[0])
    if not lines or lines[-1][0] == 0:
        raise ConfigError(f"{source} ends at time 0; give one that lasts")
    joins_first = {node: joins for _, joins, node, _ in reversed(lines)}
    initial = dict.fromkeys(node for _, _, node, _ in lines if not joins_first[node])
    taken = {node: place for place, node in enumerate(initial)}
    workers = len(taken)
    # Places, each with the time since when it is free.
    free: deque[tuple[int, float]] = deque()
    faults: list[Fault] = []
    for time_s, joins, node, place in lines:
        if joins == (node in taken):
            state = "is there already" if joins else "is not there"
            raise ConfigError(f"{place}: node {node} {state} at that time; leave the line out")
        if not joins:
            free.append((taken.pop(node), time_s))
        elif free and free[0][1] < time_s:
            worker, since_s = free.popleft()
            faults.append(Fault((worker,), since_s, time_s, cause="removed"))
            taken[node] = worker
        else:
            if time_s > 0:
                faults.append(Fault((workers,), 0.0, time_s, cause="not there yet"))
            taken[node] = workers
            workers += 1
    faults += (Fault((worker,), since_s, cause="removed") for worker, since_s in free)
    return Trace.from_faults(faults, workers=workers, duration_s=lines[-1][0], name="membership")


def _membership(text: str, place: str) -> tuple[float, bool, str]:
    """Return the seconds, whether a node joins, and the node."""
    parts: Sequence[str] = [part.strip() for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigError(f"{place}: has {len(parts)} values; write `milliseconds,add|remove,node`")
    time, action, node = parts
    if action not in ("add", "remove"):
        raise ConfigError(f"{place}: {action!r} must be add or remove")
    if not node:
        raise ConfigError(f"{place}: the name of the node is missing")
    try:
        time_s = float(time) / 1000
    except ValueError:
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise ConfigError(f"{place}: the time {time!r} must be a number of milliseconds, 0 or more")
    return time_s, action == "add", node
