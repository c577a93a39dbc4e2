"""Chameleon's own format: JSON lines, the first for the trace and one for each event."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.json_values import (
    JSON_DECODER,
    errors_at,
    members,
    number_in,
    require_hosts,
    text_in,
)
from chameleon_ft.simulate.traces.trace import Event, Trace, first_misfit

_Value = TypeVar("_Value")

FORMAT = 1
"""Version of the format, the value of `chameleon_trace` in the first line."""


def parse_jsonl(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace that `trace_to_jsonl` wrote as `text`.

    Raises:
        ConfigError: a line cannot be read, or does not fit the lines before it; or `nodes` is not the number of hosts.
    """
    header, *lines = text.rstrip().split("\n")
    empty = _read(header, f"{source}, line 1", _header)
    events = tuple(_read(line, f"{source}, line {number}", _event) for number, line in enumerate(lines, start=2))
    if misfit := first_misfit(events, empty.workers, empty.duration_s):
        index, reason = misfit
        raise ConfigError(f"{source}, line {index + 2}, {reason}")
    require_hosts(empty.hosts, nodes, source)
    return Trace(empty.workers, empty.duration_s, events, empty.workers_per_host, empty.name)


def trace_to_jsonl(trace: Trace) -> str:
    """Return the trace in Chameleon's own format, from which `parse_jsonl` returns an equal trace."""
    lines: list[dict[str, object]] = [
        {
            "chameleon_trace": FORMAT,
            "workers": trace.workers,
            "workers_per_host": trace.workers_per_host,
            "duration_s": trace.duration_s,
            "name": trace.name,
        }
    ]
    for event in trace.events:
        line: dict[str, object] = {"time_s": event.time_s, "kind": event.kind, "workers": event.workers}
        if event.kind == "slow":
            line["speed"] = event.speed
        if event.cause:
            line["cause"] = event.cause
        lines.append(line)
    return "".join(json.dumps(line) + "\n" for line in lines)


def _read(line: str, place: str, reader: Callable[[Any], _Value]) -> _Value:
    line = line.strip()
    with errors_at(place):
        value, end = JSON_DECODER.raw_decode(line)
        if end != len(line):
            raise ValueError(f"nothing may come after the object, but there is {line[end:][:20].strip()!r}")
        return reader(value)


def _header(value: Any) -> Trace:
    data = members(value, ("chameleon_trace", "workers", "duration_s"), ("workers_per_host", "name"))
    if data["chameleon_trace"] != FORMAT:
        raise ValueError(f"chameleon_trace {data['chameleon_trace']!r} must be {FORMAT}, the version of the format")
    counts = {"workers_per_host": 1, **data}
    for name in ("workers", "workers_per_host"):
        if type(counts[name]) is not int:
            raise ValueError(f"{name} {counts[name]!r} must be a whole number")
    return Trace(
        counts["workers"], number_in(data, "duration_s"), (), counts["workers_per_host"], _optional_text(data, "name")
    )


def _event(value: Any) -> Event:
    data = members(value, ("time_s", "kind", "workers"), ("speed", "cause"))
    kind, workers = data["kind"], data["workers"]
    if kind not in ("lost", "back", "slow"):
        raise ValueError(f"kind {kind!r} must be lost, back or slow")
    if kind == "slow" and "speed" not in data:
        raise ValueError("speed is missing; a slow event needs it")
    speed = number_in(data, "speed") if "speed" in data else 1.0
    time_s = number_in(data, "time_s")
    if not isinstance(workers, list) or any(type(worker) is not int for worker in workers):
        raise ValueError(f"workers {workers!r} must be a list of whole numbers")
    return Event(time_s, tuple(workers), kind, speed, _optional_text(data, "cause"))


def _optional_text(data: Mapping[str, Any], name: str) -> str:
    return text_in(data, name) if data.get(name, "") != "" else ""
