"""A failure trace: which workers are lost, back or slow, and when."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.events import Event, EventKind, Fault, events_of, faults_of
from chameleon_ft.simulate.traces.scaling import BURST_GAP_S, repeated, thinned
from chameleon_ft.simulate.traces.sequence import first_misfit

__all__ = ["BURST_GAP_S", "Event", "EventKind", "Fault", "Trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """What happens to the workers 0..workers-1 of a cluster in `duration_s` seconds.

    All are up and at full speed at first; those that are not there from the start are lost at time 0. The workers of
    a host have consecutive numbers. Events are in order of time and, at one time, losses come before returns and
    returns before slowness. Each event changes something: a worker is lost only while it is up, back only while it is
    lost, and slowed only while it is up and has another speed. A worker that is back has full speed.

    Raises ConfigError that names the first event for which that does not hold.
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

        Raises ConfigError as the class does, and where a fault begins after `duration_s`.
        """
        ordered = sorted(faults, key=lambda fault: (fault.start_s, fault.end_s, fault.workers, fault.speed))
        if ordered and ordered[-1].start_s > duration_s:
            raise ConfigError(f"a fault starts at {ordered[-1].start_s} s, after the end of the trace, {duration_s} s")
        return cls(workers, duration_s, events_of(ordered, duration_s), workers_per_host, name)

    @property
    def hosts(self) -> int:
        """How many hosts the workers are on."""
        return self.workers // self.workers_per_host

    def host_of(self, worker: int) -> int:
        """The number of the host that a worker is on."""
        return worker // self.workers_per_host

    def groups(self) -> Iterator[tuple[float, tuple[Event, ...]]]:
        """Yield (time_s, events) for each time at which something happens."""
        for time_s, events in itertools.groupby(self.events, key=lambda event: event.time_s):
            yield time_s, tuple(events)

    def live_at(self, time_s: float) -> frozenset[int]:
        """Return the workers that are up at a time, after what happens then."""
        live = set(range(self.workers))
        for event in itertools.takewhile(lambda event: event.time_s <= time_s, self.events):
            if event.kind == "lost":
                live.difference_update(event.workers)
            else:
                live.update(event.workers)
        return frozenset(live)

    def speeds_at(self, time_s: float) -> dict[int, float]:
        """Return the speeds of the workers that are up but slow at a time, after what happens then."""
        slow: dict[int, float] = {}
        for event in itertools.takewhile(lambda event: event.time_s <= time_s, self.events):
            for worker in event.workers:
                slow.pop(worker, None)
                if event.speed < 1:
                    slow[worker] = event.speed
        return slow

    @property
    def down_worker_hours(self) -> float:
        """Hours for which workers are lost, added up over the workers."""
        faults = (fault for fault in self.faults() if fault.speed == 0)
        hours = (len(fault.workers) * (min(fault.end_s, self.duration_s) - fault.start_s) / 3600 for fault in faults)
        return math.fsum(hours)

    @property
    def up_worker_hours(self) -> float:
        """Hours for which workers are up, slow ones too, added up over the workers."""
        return self.workers * self.duration_s / 3600 - self.down_worker_hours

    def faults(self) -> tuple[Fault, ...]:
        """Return what is wrong with the workers as faults, by start; one that does not end here has no end."""
        return faults_of(self.events)

    def limited(self, duration_s: float) -> Trace:
        """Return the beginning of the trace, up to `duration_s`, or all of it where it is shorter."""
        end_s = min(duration_s, self.duration_s)
        events = tuple(event for event in self.events if event.time_s <= end_s)
        return replace(self, duration_s=end_s, events=events)

    def compressed(self, rate_factor: float) -> Trace:
        """Return the trace with every time divided by `rate_factor`, its own duration too.

        The same faults come `rate_factor` times as often and are repaired as much sooner, so the share of the workers
        that is up stays as it was: only how often something changes is another.
        """
        _require_factor(rate_factor)
        events = tuple(replace(event, time_s=event.time_s / rate_factor) for event in self.events)
        return replace(self, duration_s=self.duration_s / rate_factor, events=events)

    def scaled(self, rate_factor: float, *, seed: int = 0) -> Trace:
        """Return a trace as long as this one with `rate_factor` times as many faults, each repaired as slowly as here.

        Above 1, the faults start `rate_factor` times as often and come round again, on hosts that `seed` shuffles,
        until the time is filled; the variation of the gaps stays as it was. A fault that would hit a host that is
        still down hits another. Below 1, `seed` draws which incidents (faults with gaps under `BURST_GAP_S`) are kept.
        With the rate the share of the workers that is down grows too. What is down at time 0 stays as it is, and a
        fault that has not ended here is as long as what is seen of it. The same seed gives the same trace.
        """
        _require_factor(rate_factor)
        if rate_factor == 1:
            return self
        faults = self.faults()
        initial = [fault for fault in faults if fault.start_s == 0]
        later = [fault for fault in faults if fault.start_s > 0]
        generator = random.Random(f"scaled {seed}")
        chosen = (
            thinned(later, rate_factor, generator)
            if rate_factor < 1
            else repeated(
                later,
                rate_factor,
                down=initial,
                hosts=self.hosts,
                workers_per_host=self.workers_per_host,
                duration_s=self.duration_s,
                generator=generator,
            )
        )
        return Trace.from_faults(
            [*initial, *chosen],
            workers=self.workers,
            duration_s=self.duration_s,
            workers_per_host=self.workers_per_host,
            name=self.name,
        )

    def on_hosts(self, hosts: int, *, workers_per_host: int) -> Trace:
        """Return what happens to the first `hosts` hosts, as seen by `workers_per_host` workers on each.

        In a trace with one worker to a host, that worker stands for the host: what happens to it happens to all
        workers of the host. Raises ConfigError where the trace has fewer hosts, and where it has several workers to a
        host but not `workers_per_host`.
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
