"""What happens to workers: faults, which last, and events, the moments at which they change something."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from chameleon_ft.errors import ConfigError

__all__ = ["Event", "EventKind", "Fault", "events_of", "faults_of"]

EventKind = Literal["lost", "back", "slow"]

_ORDER: dict[str, int] = {kind: order for order, kind in enumerate(get_args(EventKind))}


@dataclass(frozen=True, slots=True)
class Event:
    """A moment at which something happens to workers. Raises ConfigError where it says nothing or what cannot be."""

    time_s: float
    """Seconds since the trace began."""
    workers: tuple[int, ...]
    """Their numbers, ascending."""
    kind: EventKind
    """`lost`: gone, with all that they held. `back`: there again, empty and at full speed. `slow`: at `speed` from then
    on."""
    speed: float = 1.0
    """Of `slow`: share of the normal speed, up to 1, which ends the slowness. Otherwise 1."""
    cause: str = ""
    """What the trace calls it; empty where it does not say."""

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
        """Where it stands among others: by time, and at one time losses, then returns, then slowness."""
        return self.time_s, _ORDER[self.kind]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong with workers for a while. Raises ConfigError where it is wrong for no time or no one."""

    workers: tuple[int, ...]
    """Their numbers, ascending."""
    start_s: float
    """Seconds since the trace began."""
    end_s: float = math.inf
    """When it is over: from then on the workers are as they were, unless another fault holds them."""
    speed: float = 0.0
    """Share of the normal speed while it lasts, below 1; 0: the workers are gone."""
    cause: str = ""
    """What the trace calls it; empty where it does not say."""

    def __post_init__(self) -> None:
        _require_workers(self.workers, "a fault")
        if not 0 <= self.start_s < math.inf:
            raise ConfigError(f"start_s {self.start_s} of a fault must be a number of seconds, 0 or more")
        if not self.end_s > self.start_s:
            raise ConfigError(f"end_s {self.end_s} of a fault must come after its start_s, {self.start_s}")
        if not 0 <= self.speed < 1:
            raise ConfigError(f"speed {self.speed} of a fault must be 0, for a loss, or a share below 1")


def events_of(faults: Sequence[Fault], duration_s: float) -> tuple[Event, ...]:
    """Return what `faults` change until `duration_s`, in order.

    A worker is as slow as the worst of the faults that hold it at a time, and is lost while one of them is a loss: it
    is back when all of those have ended. Where one fault ends at the moment another begins, nothing happens between.
    """
    moments: dict[float, list[int]] = defaultdict(list)
    for number, fault in enumerate(faults):
        for time_s in (fault.start_s, fault.end_s):
            if time_s <= duration_s:
                moments[time_s].append(number)
    held: dict[int, dict[int, float]] = defaultdict(dict)  # worker -> fault -> speed
    events: list[Event] = []
    for time_s, numbers in sorted(moments.items()):
        before = {worker: _worst(held[worker]) for number in numbers for worker in faults[number].workers}
        ended: dict[int, int] = {}
        for number in numbers:
            fault = faults[number]
            for worker in fault.workers:
                if fault.start_s == time_s:
                    held[worker][number] = fault.speed
                else:
                    del held[worker][number]
                    ended[worker] = number
        events += _changes(time_s, faults, before, {worker: _worst(held[worker]) for worker in before}, ended)
    return tuple(events)


def faults_of(events: Iterable[Event]) -> tuple[Fault, ...]:
    """Return the faults that change what `events` change, by start; one that never ends has no end in them either."""
    begun: dict[int, Event] = {}
    faults: list[Fault] = []

    def end(workers: Iterable[int], time_s: float) -> None:
        ended: dict[Event, list[int]] = defaultdict(list)
        for worker in workers:
            if worker in begun:
                ended[begun.pop(worker)].append(worker)
        faults.extend(_fault(event, tuple(group), time_s) for event, group in ended.items())

    for event in events:
        end(event.workers, event.time_s)
        if event.kind == "lost" or event.speed < 1:
            begun.update(dict.fromkeys(event.workers, event))
    end(sorted(begun), math.inf)
    return tuple(sorted(faults, key=lambda fault: (fault.start_s, fault.workers)))


def _require_workers(workers: tuple[int, ...], whose: str) -> None:
    if not workers:
        raise ConfigError(f"{whose} has no workers; name at least one")
    ascending = all(first < second for first, second in itertools.pairwise(workers))
    if workers[0] < 0 or not ascending:
        raise ConfigError(f"workers {list(workers)} of {whose} must be numbers from 0, ascending, none twice")


def _worst(held: dict[int, float]) -> tuple[float, int]:
    """Return (speed, fault) of the worst of the faults that hold a worker, the first of equals; no fault is -1."""
    return min(zip(held.values(), held, strict=True), default=(1.0, -1))


def _changes(
    time_s: float,
    faults: Sequence[Fault],
    before: dict[int, tuple[float, int]],
    after: dict[int, tuple[float, int]],
    ended: dict[int, int],
) -> list[Event]:
    """Return the events of a moment; workers that one fault changes in the same way share an event.

    `ended` has a fault that ended at that moment for each worker that one let go.
    """
    groups: dict[tuple[EventKind, int, float], list[int]] = defaultdict(list)
    for worker, (old, _) in before.items():
        speed, number = after[worker]
        if old == speed:
            continue
        if speed == 0:
            groups["lost", number, 1.0].append(worker)
            continue
        if old == 0:
            groups["back", ended[worker], 1.0].append(worker)
        if old != 0 or speed < 1:
            groups["slow", number if number >= 0 else ended[worker], speed].append(worker)
    events = [
        Event(time_s, tuple(sorted(workers)), kind, speed, faults[number].cause)
        for (kind, number, speed), workers in groups.items()
    ]
    return sorted(events, key=lambda event: (event.order, event.workers))


def _fault(event: Event, workers: tuple[int, ...], end_s: float) -> Fault:
    speed = event.speed if event.kind == "slow" else 0.0
    return Fault(tuple(sorted(workers)), event.time_s, end_s, speed, event.cause)
