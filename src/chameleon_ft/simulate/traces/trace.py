"""Failure traces: which workers are lost, back or slow, and when; and figures to compare traces by.

Faults last; events are the moments at which faults change something.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

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
        cause: The name that the trace gives to the cause; empty if it gives none.

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
        cause: The name that the trace gives to the cause; empty if it gives none.

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
    # Faults that start or end at each time.
    moments: dict[float, list[int]] = defaultdict(list)
    for number, fault in enumerate(faults):
        for time_s in (fault.start_s, fault.end_s):
            if time_s <= duration_s:
                moments[time_s].append(number)
    # The speed of each worker under each fault that holds it.
    active: dict[int, dict[int, float]] = defaultdict(dict)
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
    # The event that began the fault of each worker.
    begun: dict[int, Event] = {}
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


BURST_GAP_S = 300.0
"""Faults with shorter gaps are one incident."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Events of the workers 0..workers-1 of a cluster in `duration_s` seconds.

    All workers are live and at full speed at first; those that are absent from the start are lost at time 0. The
    workers of a host have consecutive numbers. Events are in order of time and, at one time, losses come before returns
    and returns before slowness. Each event changes something: a worker is lost only while it is live, back only while
    it is lost, and slowed only while it is live and has another speed. A worker that is back has full speed.

    Raises:
        ConfigError: a number is out of range, or an event, the first of which is named, breaks these rules.
    """

    workers: int
    duration_s: float
    events: tuple[Event, ...]
    workers_per_host: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers {self.workers} of a trace must be at least 1")
        if not 0 < self.duration_s < math.inf:
            raise ConfigError(f"duration_s {self.duration_s} of a trace must be a number of seconds above 0")
        if self.workers_per_host < 1 or self.workers % self.workers_per_host:
            raise ConfigError(
                f"workers {self.workers} must be a multiple of workers_per_host {self.workers_per_host}, at least 1"
            )
        if misfit := first_misfit(self.events, self.workers, self.duration_s):
            index, reason = misfit
            raise ConfigError(f"event {index + 1} of the trace, {reason}")

    @classmethod
    def from_faults(
        cls, faults: Iterable[Fault], *, workers: int, duration_s: float, workers_per_host: int = 1, name: str = ""
    ) -> Trace:
        """Return the trace of `faults`, which may overlap and come in any order; see `events_of`.

        Raises:
            ConfigError: as the class does, or a fault begins after `duration_s`.
        """
        ordered = sorted(faults, key=lambda fault: (fault.start_s, fault.end_s, fault.workers, fault.speed))
        if ordered and ordered[-1].start_s > duration_s:
            raise ConfigError(f"a fault starts at {ordered[-1].start_s} s, after the end of the trace, {duration_s} s")
        return cls(workers, duration_s, events_of(ordered, duration_s), workers_per_host, name)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.workers // self.workers_per_host

    def host_of(self, worker: int) -> int:
        """Return the number of the host of a worker."""
        return worker // self.workers_per_host

    def groups(self) -> Iterator[tuple[float, tuple[Event, ...]]]:
        """Yield (time_s, events) for each time that has events."""
        for time_s, events in itertools.groupby(self.events, key=lambda event: event.time_s):
            yield time_s, tuple(events)

    def faults(self) -> tuple[Fault, ...]:
        """Return the faults of the workers, by start; the end of one that outlasts the trace is infinite."""
        return faults_of(self.events)

    @property
    def down_worker_hours(self) -> float:
        """Hours for which workers are lost, summed over the workers."""
        return self._hours(fault for fault in self.faults() if fault.speed == 0)

    @property
    def up_worker_hours(self) -> float:
        """Hours for which workers are live, slow or not, summed over the workers."""
        return self.workers * self.duration_s / 3600 - self.down_worker_hours

    @property
    def slow_worker_hours(self) -> float:
        """Hours for which workers are live but slow, summed over the workers."""
        return self._hours(fault for fault in self.faults() if fault.speed > 0)

    def _hours(self, faults: Iterable[Fault]) -> float:
        return math.fsum(
            len(fault.workers) * (min(fault.end_s, self.duration_s) - fault.start_s) / 3600 for fault in faults
        )

    def limited(self, duration_s: float) -> Trace:
        """Return the beginning of the trace, up to `duration_s`, or all of a shorter one."""
        end_s = min(duration_s, self.duration_s)
        events = tuple(event for event in self.events if event.time_s <= end_s)
        return replace(self, duration_s=end_s, events=events)

    def compressed(self, rate_factor: float) -> Trace:
        """Return the trace with every time divided by `rate_factor`, its duration too.

        Faults come `rate_factor` times as often, and repairs are as much faster, so the share of live workers stays.
        """
        _require_factor(rate_factor)
        events = tuple(replace(event, time_s=event.time_s / rate_factor) for event in self.events)
        return replace(self, duration_s=self.duration_s / rate_factor, events=events)

    def scaled(self, rate_factor: float, *, seed: int = 0) -> Trace:
        """Return a trace of the same duration with `rate_factor` times as many faults and the same repair times.

        Above 1, the faults start `rate_factor` times as often and are repeated, on hosts that `seed` shuffles, until
        the time is filled; the variation of the gaps stays. A fault that would hit a host that is still down hits
        another. Below 1, `seed` draws which incidents (faults with gaps under `BURST_GAP_S`) are kept. The share of
        workers that is down grows with the rate. Faults of time 0 stay as they are, and a fault that outlasts the trace
        is as long as the part that is seen of it. Equal seeds give equal traces.
        """
        _require_factor(rate_factor)
        if rate_factor == 1:
            return self
        faults = self.faults()
        initial = [fault for fault in faults if fault.start_s == 0]
        later = [fault for fault in faults if fault.start_s > 0]
        generator = random.Random(f"scaled {seed}")
        chosen = (
            _thinned(later, rate_factor, generator)
            if rate_factor < 1
            else _repeated(self, initial, later, rate_factor, generator)
        )
        return Trace.from_faults(
            [*initial, *chosen],
            workers=self.workers,
            duration_s=self.duration_s,
            workers_per_host=self.workers_per_host,
            name=self.name,
        )

    def on_hosts(self, hosts: int, *, workers_per_host: int) -> Trace:
        """Return the events of the first `hosts` hosts, for `workers_per_host` workers on each.

        In a trace with one worker to a host, that worker stands for all workers of the host.

        Raises:
            ConfigError: the trace has fewer hosts, or several workers to a host but not `workers_per_host`.
        """
        if not 1 <= hosts <= self.hosts:
            raise ConfigError(
                f"{hosts} hosts are asked of a trace with {self.hosts}: take from 1 to {self.hosts}, "
                "say how many nodes the trace was measured on if that is more, or generate a larger one"
            )
        if self.workers_per_host not in (1, workers_per_host):
            raise ConfigError(
                f"{workers_per_host} workers per host are asked of a trace with {self.workers_per_host}: "
                f"take {self.workers_per_host}"
            )
        copies = workers_per_host // self.workers_per_host
        events = []
        for event in self.events:
            kept = [worker for worker in event.workers if worker < hosts * self.workers_per_host]
            if kept:
                workers = tuple(worker * copies + copy for worker in kept for copy in range(copies))
                events.append(replace(event, workers=workers))
        return Trace(hosts * workers_per_host, self.duration_s, tuple(events), workers_per_host, self.name)


def _require_factor(rate_factor: float) -> None:
    if not 0 < rate_factor < math.inf:
        raise ConfigError(f"rate_factor {rate_factor} must be a number above 0; 1 leaves the trace as it is")


def _thinned(faults: Sequence[Fault], share: float, generator: random.Random) -> list[Fault]:
    """Return a share of the incidents, each whole."""
    incidents: list[list[Fault]] = []
    last_s = -math.inf
    for fault in faults:
        if fault.start_s - last_s >= BURST_GAP_S:
            incidents.append([])
        incidents[-1].append(fault)
        last_s = fault.start_s
    kept = generator.sample(incidents, round(share * len(incidents)))
    return [fault for incident in kept for fault in incident]


def _repeated(
    trace: Trace, initial: Sequence[Fault], faults: Sequence[Fault], rate_factor: float, generator: random.Random
) -> list[Fault]:
    """Return `faults` starting `rate_factor` times as often, round after round until the end, and just as long.

    Every round but the first is on hosts in another order. A fault of workers that an earlier fault, or one of
    `initial`, still holds hits a host that is live; if there is none, it is left out.
    """
    back_s = [0.0] * trace.workers

    def hold(fault: Fault) -> None:
        if fault.speed == 0:
            for worker in fault.workers:
                back_s[worker] = max(back_s[worker], fault.end_s)

    for fault in initial:
        hold(fault)
    order = list(range(trace.hosts))
    found = []
    for copy in range(math.ceil(rate_factor)):
        for fault in faults:
            start_s = (copy * trace.duration_s + fault.start_s) / rate_factor
            end_s = start_s + min(fault.end_s, trace.duration_s) - fault.start_s
            if not start_s < min(end_s, trace.duration_s):
                continue
            if workers := _moved(fault, start_s, order, back_s, trace.workers_per_host, generator):
                found.append(replace(fault, workers=workers, start_s=start_s, end_s=end_s))
                hold(found[-1])
        generator.shuffle(order)
    return found


def _moved(
    fault: Fault, start_s: float, order: list[int], back_s: list[float], per_host: int, generator: random.Random
) -> tuple[int, ...]:
    """Return the workers that a fault hits, each at its place on another host that is live."""
    places: dict[int, list[int]] = defaultdict(list)
    for worker in fault.workers:
        places[worker // per_host].append(worker % per_host)
    moved: dict[int, list[int]] = {}

    def hosts_to_try(first: int) -> Iterator[int]:
        yield first
        # Drawn only if the first host is down.
        yield from generator.sample(order, len(order))

    for host, own in places.items():
        for target in hosts_to_try(order[host]):
            # A loss at the very moment of a return would be no event.
            if target not in moved and all(back_s[target * per_host + place] < start_s for place in own):
                moved[target] = own
                break
    return tuple(sorted(target * per_host + place for target, own in moved.items() for place in own))


_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Figures of a trace; nan if it has too few faults for one.

    A fault is the loss of a host or of workers on it; a loss on several hosts is as many faults. Losses at time 0 are
    the initial state and no faults. Outages that outlast the trace are in none of the figures of outages, which are
    therefore too small for short traces.

    Attributes:
        gap_variation: standard deviation of the times between faults over their mean; 1 for a Poisson process.
        short_gap_share: share of the times between faults that are below `BURST_GAP_S`.
        max_hosts_down: the most hosts that have lost a worker at one time.
        availability: share of the worker-hours for which workers are live, slow or not.
        slow_share: share of the worker-hours for which workers are live but slow.
    """

    hosts: int
    workers: int
    duration_days: float
    faults: int
    faults_per_1000_host_days: float
    outage_median_days: float
    outage_mean_days: float
    outage_p90_days: float
    gap_variation: float
    short_gap_share: float
    max_hosts_down: int
    availability: float
    slow_share: float


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Return the figures of a trace."""
    spans = sorted(
        (fault.start_s, fault.end_s, host)
        for fault in trace.faults()
        if fault.speed == 0
        for host in set(map(trace.host_of, fault.workers))
    )
    begun = [span for span in spans if span[0] > 0]
    outages = [(end_s - start_s) / _DAY_S for start_s, end_s, _ in begun if end_s <= trace.duration_s]
    median, p90 = map(float, np.quantile(outages, (0.5, 0.9))) if outages else (math.nan, math.nan)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(begun)]
    mean_gap_s = statistics.fmean(gaps) if gaps else 0.0
    total_h = trace.workers * trace.duration_s / 3600
    return TraceStatistics(
        hosts=trace.hosts,
        workers=trace.workers,
        duration_days=trace.duration_s / _DAY_S,
        faults=len(begun),
        faults_per_1000_host_days=1000 * len(begun) / (trace.hosts * trace.duration_s / _DAY_S),
        outage_median_days=median,
        outage_mean_days=statistics.fmean(outages) if outages else math.nan,
        outage_p90_days=p90,
        gap_variation=statistics.pstdev(gaps) / mean_gap_s if mean_gap_s > 0 else math.nan,
        short_gap_share=sum(gap < BURST_GAP_S for gap in gaps) / len(gaps) if gaps else math.nan,
        max_hosts_down=_max_hosts_down(spans),
        availability=trace.up_worker_hours / total_h,
        slow_share=trace.slow_worker_hours / total_h,
    )


def _max_hosts_down(spans: list[tuple[float, float, int]]) -> int:
    """Return the most different hosts in spans of (start_s, end_s, host) at one time."""
    changes = [(start_s, 1, host) for start_s, _, host in spans] + [(end_s, -1, host) for _, end_s, host in spans]
    faults_of_host: Counter[int] = Counter()
    down = most = 0
    for _, change, host in sorted(changes):
        before = faults_of_host[host]
        faults_of_host[host] += change
        down += (faults_of_host[host] > 0) - (before > 0)
        most = max(most, down)
    return most
