"""The format of the InfiniteHBD trace: a JSON list of fault_start and fault_end."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.values import JSON_DECODER, members, number_in, text_in
from chameleon_ft.simulate.traces.trace import Fault, Trace

__all__ = ["RESOLUTION_S", "parse_infinitehbd"]

RESOLUTION_S = 8.64
"""Seconds in the last digit of a time, 0.0001 days: a fault that ends at the time it starts lasted as long."""

_DAY_S = 86_400.0
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class _Element:
    place: str
    node: str
    time_s: float
    starts: bool
    cause: str


def parse_infinitehbd(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace with a worker for each of `nodes` nodes, or of those that are named.

    Nodes are numbered in the order of their names, with those that are not named, which never failed, in between.
    A node is back when all of its faults have ended; one that has not ended at the last time in the list, which is
    how long the trace is, never does. The list may be in any order.

    Raises ConfigError with the list element that cannot be read, and why.
    """
    elements = [_element(value, place) for value, place in _elements(text, source)]
    if not elements:
        raise ConfigError(f"{source} has no element, so it names no node; give one with faults")
    _require_different(elements)
    numbers, nodes = _numbered(elements, nodes, source)
    duration_s = max(element.time_s for element in elements)
    if duration_s == 0:
        raise ConfigError(f"{source} ends at time 0; give one that lasts")
    faults = _faults(elements, numbers)
    return Trace.from_faults(faults, workers=nodes, duration_s=duration_s, name="InfiniteHBD")


def _elements(text: str, source: str) -> Iterator[tuple[Any, str]]:
    """Yield the elements of the list with what messages call them."""

    def skipped(position: int) -> int:
        found = _SPACE.match(text, position)
        return position if found is None else found.end()

    position = skipped(skipped(0) + 1)
    number = 0
    more = not text.startswith("]", position)
    while more:
        number += 1
        place = f"{source}, element {number} (line {text.count(chr(10), 0, position) + 1})"
        try:
            value, position = JSON_DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}: is not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: {error}") from None
        yield value, place
        position = skipped(position)
        more = text.startswith(",", position)
        if more:
            position = skipped(position + 1)
        elif not text.startswith("]", position):
            raise ConfigError(f"{place}: a comma or the ] at the end of the list must come after it")
    if rest := text[position + 1 :].strip():
        raise ConfigError(f"{source}: nothing may come after the list, but there is {rest[:20]!r}")


def _element(value: Any, place: str) -> _Element:
    try:
        data = members(value, ("node_id", "event_time", "event_type", "fault_type"))
        kind = data["event_type"]
        if kind not in ("fault_start", "fault_end"):
            raise ValueError(f"event_type {json.dumps(kind)} must be fault_start or fault_end")
        time_s = number_in(data, "event_time") * _DAY_S
        return _Element(place, text_in(data, "node_id"), time_s, kind == "fault_start", _cause(data["fault_type"]))
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _cause(value: Any) -> str:
    data = members(value, ("Level", "Class", "Desc"))
    return ": ".join(text_in(data, name) for name in ("Class", "Desc"))


def _require_different(elements: list[_Element]) -> None:
    seen: dict[tuple[object, ...], str] = {}
    for element in elements:
        same = (element.node, element.time_s, element.starts, element.cause)
        if same in seen:
            raise ConfigError(f"{element.place}: is the same as {seen[same]}; leave out one of them")
        seen[same] = element.place


def _numbered(elements: list[_Element], nodes: int | None, source: str) -> tuple[dict[str, int], int]:
    """Number the nodes evenly among all that there are, so that any part of those has its share of faults."""
    names = sorted({element.node for element in elements})
    if nodes is not None and nodes < len(names):
        raise ConfigError(f"{source} names {len(names)} nodes; it cannot have been measured on {nodes}")
    count = nodes or len(names)
    return {name: index * count // len(names) for index, name in enumerate(names)}, count


def _faults(elements: list[_Element], numbers: dict[str, int]) -> list[Fault]:
    """Pair each end with a start of its node: the first of its cause or, failing that, the first."""
    faults: list[Fault] = []
    begun: dict[str, list[_Element]] = defaultdict(list)
    for element in sorted(elements, key=lambda element: (element.time_s, not element.starts)):
        waiting = begun[element.node]
        if element.starts:
            waiting.append(element)
            continue
        if not waiting:
            raise ConfigError(
                f"{element.place}: node {element.node} has no fault that could end at that time; "
                "leave the element out, or add the fault_start"
            )
        start = next((start for start in waiting if start.cause == element.cause), waiting[0])
        waiting.remove(start)
        end_s = max(element.time_s, start.time_s + RESOLUTION_S)
        faults.append(Fault((numbers[start.node],), start.time_s, end_s, cause=start.cause))
    for waiting in begun.values():
        faults += (Fault((numbers[start.node],), start.time_s, cause=start.cause) for start in waiting)
    return faults
