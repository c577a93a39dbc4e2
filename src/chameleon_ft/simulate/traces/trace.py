"""A failure trace: which workers are lost, back or slow, and when."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.events import Event, Fault, events_of, faults_of, first_misfit

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
