"""The format of the Bamboo traces: lines of `milliseconds,add|remove,node`, as nodes join and leave."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.values import require_hosts
from chameleon_ft.simulate.traces.trace import Fault, Trace

__all__ = ["parse_membership"]


@dataclass(frozen=True, slots=True)
class _Line:
    place: str
    time_s: float
    joins: bool
    node: str


@dataclass(slots=True)
class _Places:
    """Who has which of the places in the cluster, and since when a place is free."""

    taken: dict[str, int] = field(default_factory=dict)
    free: deque[tuple[int, float, str]] = field(default_factory=deque)
    faults: list[Fault] = field(default_factory=list)
    count: int = 0

    def join(self, line: _Line) -> None:
        """Give a node the place that has been free for longest; one that is left at this very time was not free."""
        if self.free and self.free[0][1] < line.time_s:
            place, since_s, cause = self.free.popleft()
        else:
            place, since_s, cause = self.count, 0.0, "not there yet"
            self.count += 1
        if since_s < line.time_s:
            self.faults.append(Fault((place,), since_s, line.time_s, cause=cause))
        self.taken[line.node] = place

    def leave(self, line: _Line) -> None:
        self.free.append((self.taken.pop(line.node), line.time_s, "removed"))

    def close(self) -> None:
        """What is free at the end stays so."""
        self.faults += (Fault((place,), since_s, cause=cause) for place, since_s, cause in self.free)


def parse_membership(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace with a worker for each place in the cluster: as many as nodes are there at once.

    A node that joins takes the place that has been free for longest, whatever its name. A place that is first taken
    later than at time 0 is lost until then, and a node that leaves without having joined was there from the start.
    The trace ends with the last line. The lines may be in any order.

    Raises ConfigError with the line that cannot be read, and why; and where `nodes` is not the number of places.
    """
    numbered = enumerate(text.split("\n"), start=1)
    lines = [_line(line, f"{source}, line {number}") for number, line in numbered if line.strip()]
    lines.sort(key=lambda line: line.time_s)
    if not lines or lines[-1].time_s == 0:
        raise ConfigError(f"{source} ends at time 0; give one that lasts")
    places = _Places()
    for node in _there_from_the_start(lines):
        places.join(_Line(source, 0.0, True, node))
    for line in lines:
        if line.joins == (line.node in places.taken):
            state = "is there already" if line.joins else "is not there"
            raise ConfigError(f"{line.place}: node {line.node} {state} at that time; leave the line out")
        if line.joins:
            places.join(line)
        else:
            places.leave(line)
    places.close()
    require_hosts(places.count, nodes, source)
    return Trace.from_faults(places.faults, workers=places.count, duration_s=lines[-1].time_s, name="membership")


def _there_from_the_start(lines: list[_Line]) -> list[str]:
    first: dict[str, bool] = {}
    for line in lines:
        first.setdefault(line.node, line.joins)
    return [node for node, joins in first.items() if not joins]


def _line(text: str, place: str) -> _Line:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3:
        raise ConfigError(f"{place}: has {len(parts)} values; write `milliseconds,add|remove,node`")
    time, action, node = parts
    if action not in ("add", "remove"):
        raise ConfigError(f"{place}: {action!r} must be add or remove")
    if not node:
        raise ConfigError(f"{place}: the name of the node is missing")
    return _Line(place, _seconds(time, place), action == "add", node)


def _seconds(text: str, place: str) -> float:
    try:
        time_s = float(text) / 1000
    except ValueError:
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise ConfigError(f"{place}: the time {text!r} must be a number of milliseconds, 0 or more")
    return time_s
