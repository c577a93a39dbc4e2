"""The format of the InfiniteHBD trace: a JSON list of fault_start and fault_end."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.json_values import JSON_DECODER, errors_at, members, number_in, text_in
from chameleon_ft.simulate.traces.trace import Fault, Trace

RESOLUTION_S = 8.64
"""Seconds in the last digit of a time, 0.0001 days: duration of a fault that ends at the time it starts."""

_DAY_S = 86_400.0
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class _Element:
    """An element of the list; two are equal if they say the same, wherever they stand."""

    node: str
    time_s: float
    starts: bool
    cause: str


def parse_infinitehbd(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace with a worker for each of `nodes` nodes, or of the nodes that are named.

    Nodes are numbered in the order of their names. Nodes that are not named never failed; they lie evenly in between,
    so that any part of the nodes has its share of faults. A node is back when all of its faults have ended. The trace
    ends with the last time in the list, which may be in any order.

    Raises:
        ConfigError: an element cannot be read, or its end has no start; names the element and the reason.
    """
    places: dict[_Element, str] = {}
    for value, place in _elements(text, source):
        with errors_at(place):
            element = _element(value)
        if element in places:
            raise ConfigError(f"{place}: is the same as {places[element]}; leave out one of them")
        places[element] = place
    if not places:
        raise ConfigError(f"{source} has no element, so it names no node; give one with faults")
    names = sorted({element.node for element in places})
    if nodes is not None and nodes < len(names):
        raise ConfigError(f"{source} names {len(names)} nodes; it cannot have been measured on {nodes}")
    count = nodes or len(names)
    numbers = {name: index * count // len(names) for index, name in enumerate(names)}
    duration_s = max(element.time_s for element in places)
    if duration_s == 0:
        raise ConfigError(f"{source} ends at time 0; give one that lasts")
    return Trace.from_faults(_faults(places, numbers), workers=count, duration_s=duration_s, name="InfiniteHBD")


def _elements(text: str, source: str) -> Iterator[tuple[Any, str]]:
    """Yield the elements of the list, each with its place for messages."""

    def skip_space(position: int) -> int:
        found = _SPACE.match(text, position)
        return position if found is None else found.end()

    position = skip_space(skip_space(0) + 1)
    number = 0
    more = not text.startswith("]", position)
    while more:
        number += 1
        place = f"{source}, element {number} (line {text.count(chr(10), 0, position) + 1})"
        with errors_at(place):
            value, position = JSON_DECODER.raw_decode(text, position)
        yield value, place
        position = skip_space(position)
        more = text.startswith(",", position)
        if more:
            position = skip_space(position + 1)
        elif not text.startswith("]", position):
            raise ConfigError(f"{place}: a comma or the ] at the end of the list must come after it")
    if rest := text[position + 1 :].strip():
        raise ConfigError(f"{source}: nothing may come after the list, but there is {rest[:20]!r}")


def _element(value: Any) -> _Element:
    data = members(value, ("node_id", "event_time", "event_type", "fault_type"))
    kind = data["event_type"]
    if kind not in ("fault_start", "fault_end"):
        raise ValueError(f"event_type {json.dumps(kind)} must be fault_start or fault_end")
    time_s = number_in(data, "event_time") * _DAY_S
    node = text_in(data, "node_id")
    cause = members(data["fault_type"], ("Level", "Class", "Desc"))
    return _Element(node, time_s, kind == "fault_start", f"{text_in(cause, 'Class')}: {text_in(cause, 'Desc')}")


def _faults(places: dict[_Element, str], numbers: dict[str, int]) -> list[Fault]:
    """Pair each end with a start of its node: the first of its cause or, failing that, the first."""
    faults: list[Fault] = []
    open_starts: dict[str, list[_Element]] = defaultdict(list)
    for element in sorted(places, key=lambda element: (element.time_s, not element.starts)):
        starts = open_starts[element.node]
        if element.starts:
            starts.append(element)
            continue
        if not starts:
            raise ConfigError(
                f"{places[element]}: node {element.node} has no fault that could end at that time; "
                "leave the element out, or add the fault_start"
            )
        start = next((start for start in starts if start.cause == element.cause), starts[0])
        starts.remove(start)
        end_s = max(element.time_s, start.time_s + RESOLUTION_S)
        faults.append(Fault((numbers[start.node],), start.time_s, end_s, cause=start.cause))
    for starts in open_starts.values():
        faults += (Fault((numbers[start.node],), start.time_s, cause=start.cause) for start in starts)
    return faults
