"""Faults of workers, which last, and events, the moments at which faults change something."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from chameleon_ft.errors import ConfigError

EventKind = Literal["lost", "back", "slow"]

_ORDER: dict[str, int] = {kind: order for order, kind in enumerate(get_args(EventKind))}


@dataclass(frozen=True, slots=True)
class Event:
    """A moment at which the state of workers changes.

    Attributes:
        time_s: seconds since the trace began.
        workers: numbers of the workers, ascending.
        kind: `lost`: gone, with all that they held. `back`: live again, empty and at full speed. `slow`: at `speed`
            from then on.
        speed: share of the normal speed after a `slow` event, where 1 ends the slowness; 1 in other events.
        cause: as the trace calls it; empty if the trace gives none.

    Raises:
        ConfigError: a value is out of range, or `speed` contradicts `kind`.
    """

    time_s: float
    workers: tuple[int, ...]
    kind: EventKind
    speed: float = 1.0
    cause: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < math.inf:
            raise ConfigError(f"time_s {self.time_s} of an event must be a number of seconds, 0 or more")
        _require_workers(self.workers, "an event")
        if self.kind not in _ORDER:
            raise ConfigError(f"kind {self.kind!r} of an event must be one of {', '.join(_ORDER)}")
        if self.kind == "slow" and not 0 < self.speed <= 1:
            raise ConfigError(f"speed {self.speed} of a slow event must be above 0 and at most 1, the normal speed")
        if self.kind != "slow" and self.speed != 1:
            raise ConfigError(f"speed {self.speed} of a {self.kind} event must be 1; only slow events have another")

    @property
    def order(self) -> tuple[float, int]:
        """Position among other events: by time, and at one time losses, then returns, then slowness."""
        return self.time_s, _ORDER[self.kind]


@dataclass(frozen=True, slots=True)
class Fault:
    """A loss or slowness of workers that lasts for a while.

    Attributes:
        workers: numbers of the workers, ascending.
        start_s: seconds since the trace began.
        end_s: time from which the workers are as before, unless another fault holds them.
        speed: share of the normal speed meanwhile, below 1; 0 if the workers are lost.
        cause: as the trace calls it; empty if the trace gives none.

    Raises:
        ConfigError: a value is out of range.
    """

    workers: tuple[int, ...]
    start_s: float
    end_s: float = math.inf
    speed: float = 0.0
    cause: str = ""

    def __post_init__(self) -> None:
        _require_workers(self.workers, "a fault")
        if not 0 <= self.start_s < math.inf:
            raise ConfigError(f"start_s {self.start_s} of a fault must be a number of seconds, 0 or more")
        if not self.end_s > self.start_s:
            raise ConfigError(f"end_s {self.end_s} of a fault must come after its start_s, {self.start_s}")
        if not 0 <= self.speed < 1:
            raise ConfigError(f"speed {self.speed} of a fault must be 0, for a loss, or a share below 1")


def _require_workers(workers: tuple[int, ...], whose: str) -> None:
    if not workers:
        raise ConfigError(f"{whose} has no workers; name at least one")
    ascending = all(first < second for first, second in itertools.pairwise(workers))
    if workers[0] < 0 or not ascending:
        raise ConfigError(f"workers {list(workers)} of {whose} must be numbers from 0, ascending, none twice")


def events_of(faults: Sequence[Fault], duration_s: float) -> tuple[Event, ...]:
    """Return the changes that `faults` make until `duration_s`, in order.

    A worker is as slow as the worst of the faults that hold it. It is lost while one of them is a loss, and back when
    all losses have ended. If one fault ends at the moment another begins, nothing happens in between. Workers that one
    fault changes in the same way share an event.
    """
    moments: dict[float, list[int]] = defaultdict(list)  # time -> faults that start or end then
    for number, fault in enumerate(faults):
        for time_s in (fault.start_s, fault.end_s):
            if time_s <= duration_s:
                moments[time_s].append(number)
    active: dict[int, dict[int, float]] = defaultdict(dict)  # worker -> fault -> speed
    events: list[Event] = []
    for time_s, numbers in sorted(moments.items()):
        before = {worker: _worst(active[worker])[0] for number in numbers for worker in faults[number].workers}
        ended: dict[int, int] = {}
        for number in numbers:
            for worker in faults[number].workers:
                if faults[number].start_s == time_s:
                    active[worker][number] = faults[number].speed
                else:
                    del active[worker][number]
                    ended[worker] = number
        groups: dict[tuple[EventKind, int, float], list[int]] = defaultdict(list)
        for worker, old in before.items():
            speed, number = _worst(active[worker])
            if speed == old:
                continue
            if speed == 0:
                groups["lost", number, 1.0].append(worker)
                continue
            if old == 0:
                groups["back", ended[worker], 1.0].append(worker)
            if old != 0 or speed < 1:
                groups["slow", number if number >= 0 else ended[worker], speed].append(worker)
        changes = [
            Event(time_s, tuple(sorted(workers)), kind, speed, faults[number].cause)
            for (kind, number, speed), workers in groups.items()
        ]
        events += sorted(changes, key=lambda event: (event.order, event.workers))
    return tuple(events)


def _worst(active: dict[int, float]) -> tuple[float, int]:
    """Return (speed, fault) of the worst of the faults that hold a worker; (1, -1) if none does."""
    return min(zip(active.values(), active, strict=True), default=(1.0, -1))


def faults_of(events: Iterable[Event]) -> tuple[Fault, ...]:
    """Return the faults that cause `events`, by start; the end of one that never ends is infinite."""
    begun: dict[int, Event] = {}  # by worker
    faults: list[Fault] = []

    def end(workers: Iterable[int], time_s: float) -> None:
        ended: dict[Event, list[int]] = defaultdict(list)
        for worker in workers:
            if worker in begun:
                ended[begun.pop(worker)].append(worker)
        for event, group in ended.items():
            speed = event.speed if event.kind == "slow" else 0.0
            faults.append(Fault(tuple(sorted(group)), event.time_s, time_s, speed, event.cause))

    for event in events:
        end(event.workers, event.time_s)
        if event.kind == "lost" or event.speed < 1:
            begun.update(dict.fromkeys(event.workers, event))
    end(sorted(begun), math.inf)
    return tuple(sorted(faults, key=lambda fault: (fault.start_s, fault.workers)))


def first_misfit(events: Sequence[Event], workers: int, duration_s: float) -> tuple[int, str] | None:
    """Return (index, reason) of the first event that does not fit the events before it; None if all fit."""
    last: dict[int, Event] = {}
    previous = (0.0, 0)
    for index, event in enumerate(events):
        problem = None
        if event.time_s > duration_s:
            problem = f"the trace ends before, at {duration_s} s; make it longer or leave the event out"
        elif event.order < previous:
            problem = "it comes after a later one; sort by time and, at one time, by lost, back, slow"
        elif event.workers[-1] >= workers:
            problem = f"worker {event.workers[-1]} is not one of 0..{workers - 1}"
        else:
            misfits = (_misfit(event, worker, last.get(worker)) for worker in event.workers)
            problem = next(filter(None, misfits), None)
        if problem:
            return index, f"{event.kind} at {event.time_s} s: {problem}"
        previous = event.order
        last.update(dict.fromkeys(event.workers, event))
    return None


def _misfit(event: Event, worker: int, last: Event | None) -> str | None:
    """Return why an event of a worker cannot follow the last one of that worker; None if it can."""
    lost = last is not None and last.kind == "lost"
    speed = 1.0 if last is None else last.speed
    if lost != (event.kind == "back") or (event.kind == "slow" and event.speed == speed):
        state = "lost" if lost else f"up, at speed {speed:g}"
        return f"worker {worker} is {state} at that time; an event must change something"
    if last is not None and last.time_s == event.time_s and (last.kind, event.kind) != ("back", "slow"):
        return f"worker {worker} is {last.kind} at the same time; leave out one of the two"
    return None
