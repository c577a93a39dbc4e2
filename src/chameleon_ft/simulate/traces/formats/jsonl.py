"""Chameleon's own format: JSON lines, the first about the trace and one for each event."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.values import JSON_DECODER, members, number_in, require_hosts, text_in
from chameleon_ft.simulate.traces.sequence import first_misfit
from chameleon_ft.simulate.traces.trace import Event, Trace

__all__ = ["FORMAT", "parse_jsonl", "trace_to_jsonl"]

_Value = TypeVar("_Value")

FORMAT = 1
"""Version of the format, the value of `chameleon_trace` in the first line."""


def parse_jsonl(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace that `trace_to_jsonl` wrote as `text`.

    Raises ConfigError with the line that cannot be read, or that does not fit those before it, and why; and where
    `nodes` is not the number of hosts that the trace says it has.
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
    """Return the trace in Chameleon's own format; `parse_jsonl` makes the same trace of it again."""
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


def _header(value: Any) -> Trace:
    data = members(value, ("chameleon_trace", "workers", "duration_s"), ("workers_per_host", "name"))
    if data["chameleon_trace"] != FORMAT:
        raise ValueError(f"chameleon_trace {data['chameleon_trace']!r} must be {FORMAT}, the version of the format")
    workers_per_host = _count(data, "workers_per_host") if "workers_per_host" in data else 1
    return Trace(_count(data, "workers"), number_in(data, "duration_s"), (), workers_per_host, _text(data, "name"))


def _event(value: Any) -> Event:
    data = members(value, ("time_s", "kind", "workers"), ("speed", "cause"))
    kind = data["kind"]
    if kind not in ("lost", "back", "slow"):
        raise ValueError(f"kind {kind!r} must be lost, back or slow")
    if kind == "slow" and "speed" not in data:
        raise ValueError("speed is missing; a slow event needs it")
    speed = number_in(data, "speed") if "speed" in data else 1.0
    return Event(number_in(data, "time_s"), _workers(data["workers"]), kind, speed, _text(data, "cause"))


def _read(line: str, place: str, reader: Callable[[Any], _Value]) -> _Value:
    try:
        value, end = JSON_DECODER.raw_decode(line.strip())
        if end != len(line.strip()):
            raise ValueError(f"nothing may come after the object, but there is {line.strip()[end:][:20].strip()!r}")
        return reader(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} {value!r} must be a whole number")
    return value


def _workers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(worker) is not int for worker in value):
        raise ValueError(f"workers {value!r} must be a list of whole numbers")
    return tuple(value)


def _text(data: Mapping[str, Any], name: str) -> str:
    return text_in(data, name) if data.get(name, "") != "" else ""
