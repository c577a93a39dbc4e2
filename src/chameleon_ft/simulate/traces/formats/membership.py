"""The format of the Bamboo traces: lines of `milliseconds,add|remove,node`, as nodes join and leave."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.json_values import require_hosts
from chameleon_ft.simulate.traces.trace import Fault, Trace


@dataclass(frozen=True, slots=True)
class _Line:
    place: str
    time_s: float
    joins: bool
    node: str


def parse_membership(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace with a worker for each place in the cluster: as many as there are nodes at once.

    A node that joins takes the place that has been free for longest, whatever its name; a place that is left at the
    same moment does not count as free. A place that is first taken after time 0 is lost until then. A node that leaves
    without having joined was there from the start. The trace ends with the last line. The lines may be in any order.

    Raises:
        ConfigError: a line cannot be read, or `nodes` is not the number of places.
    """
    numbered = enumerate(text.split("\n"), start=1)
    lines = [_line(line, f"{source}, line {number}") for number, line in numbered if line.strip()]
    lines.sort(key=lambda line: line.time_s)
    if not lines or lines[-1].time_s == 0:
        raise ConfigError(f"{source} ends at time 0; give one that lasts")
    joins_first = {line.node: line.joins for line in reversed(lines)}
    initial = dict.fromkeys(line.node for line in lines if not joins_first[line.node])
    taken = {node: place for place, node in enumerate(initial)}
    places = len(taken)
    free: deque[tuple[int, float]] = deque()  # (place, since when)
    faults: list[Fault] = []
    for line in lines:
        if line.joins == (line.node in taken):
            state = "is there already" if line.joins else "is not there"
            raise ConfigError(f"{line.place}: node {line.node} {state} at that time; leave the line out")
        if not line.joins:
            free.append((taken.pop(line.node), line.time_s))
        elif free and free[0][1] < line.time_s:
            place, since_s = free.popleft()
            faults.append(Fault((place,), since_s, line.time_s, cause="removed"))
            taken[line.node] = place
        else:
            if line.time_s > 0:
                faults.append(Fault((places,), 0.0, line.time_s, cause="not there yet"))
            taken[line.node] = places
            places += 1
    faults += (Fault((place,), since_s, cause="removed") for place, since_s in free)
    require_hosts(places, nodes, source)
    return Trace.from_faults(faults, workers=places, duration_s=lines[-1].time_s, name="membership")


def _line(text: str, place: str) -> _Line:
    parts = [part.strip() for part in text.split(",")]
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
    return _Line(place, time_s, action == "add", node)
