"""Random traces: arrivals of faults, repairs and slow workers from models that are fitted to measured traces."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.trace import BURST_GAP_S, Fault, Trace

_DAY_S = 86_400.0
_SHORTEST_S = 1.0
# Draws of a worker until the live ones are listed.
_TRIES = 8


def _require_share(name: str, value: float) -> None:
    """Raise ConfigError if a value is no share."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} {value} must be a share, from 0 to 1")


def _require_positive(name: str, value: float) -> None:
    """Raise ConfigError if a value is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} {value} must be a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """Independent gaps with a Weibull distribution.

    Attributes:
        shape: below 1, gaps vary more than those of a Poisson process; 1 is that process; above, they are more even.
    """

    shape: float = 0.59

    def __post_init__(self) -> None:
        if not 0.2 <= self.shape <= 20:
            raise ConfigError(f"shape {self.shape} of Weibull gaps must be from 0.2 to 20; 1 is a Poisson process")

    def faults(self, duration_s: float, mean_gap_s: float, generator: random.Random) -> list[tuple[float, int]]:
        """Return (time_s, incident) of the faults before `duration_s`, ascending, every `mean_gap_s` on average.

        Faults with the same number of an incident have one cause; here each fault is an incident.
        """
        scale_s = mean_gap_s / math.gamma(1 + 1 / self.shape)
        faults: list[tuple[float, int]] = []
        time_s = generator.weibullvariate(scale_s, self.shape)
        while time_s < duration_s:
            faults.append((time_s, len(faults)))
            time_s += generator.weibullvariate(scale_s, self.shape)
        return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson(Weibull):
    """Independent exponential gaps: a Weibull distribution of shape 1."""

    shape: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSizes:
    """Faults per incident: n with a probability proportional to n ** -exponent, up to `largest`."""

    exponent: float
    largest: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.exponent <= 20:
            raise ConfigError(f"exponent {self.exponent} of incident sizes must be from 1 to 20; higher is smaller")
        if not 1 <= self.largest <= 10_000:
            raise ConfigError(f"largest incident {self.largest} must be from 1 to 10000 faults")

    @property
    def mean(self) -> float:
        """Mean faults per incident."""
        weights = self._weights()
        return sum(size * weight for size, weight in enumerate(weights, start=1)) / sum(weights)

    def draws(self, generator: random.Random) -> Iterator[int]:
        """Yield sizes of incidents without end."""
        cumulative = list(itertools.accumulate(self._weights()))
        while True:
            yield bisect.bisect(cumulative, generator.random() * cumulative[-1]) + 1

    def _weights(self) -> list[float]:
        return [size**-self.exponent for size in range(1, self.largest + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Incidents with Weibull gaps, each of one or more faults within `BURST_GAP_S` (a Neyman-Scott process).

    Attributes:
        gaps: between the first faults of incidents.
        sizes: faults per incident.
        simultaneous_share: share of the further faults of an incident that come with the first; the others come at any
            time of the burst.
    """

    gaps: Weibull = Weibull(shape=0.625)
    sizes: IncidentSizes = IncidentSizes(exponent=3.9)
    simultaneous_share: float = 0.65

    def __post_init__(self) -> None:
        _require_share("simultaneous_share", self.simultaneous_share)

    def faults(self, duration_s: float, mean_gap_s: float, generator: random.Random) -> list[tuple[float, int]]:
        """Return (time_s, incident) of the faults; see `Weibull.faults`."""
        firsts = self.gaps.faults(duration_s, mean_gap_s * self.sizes.mean, generator)
        faults = list(firsts)
        sizes = self.sizes.draws(generator)
        for first_s, incident in firsts:
            for _ in range(next(sizes) - 1):
                simultaneous = generator.random() < self.simultaneous_share
                faults.append((first_s + (0.0 if simultaneous else BURST_GAP_S * generator.random()), incident))
        return sorted(fault for fault in faults if fault[0] < duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """Durations of outages: lognormal, cut off at `longest_days`, when the host is replaced.

    Attributes:
        spread: standard deviation of the logarithm; 0: every repair takes the median.
        together_share: share of the further faults of an incident that are repaired at the same moment as the first.
    """

    median_days: float = 0.9
    spread: float = 2.2
    longest_days: float = 90.0
    together_share: float = 0.8

    def __post_init__(self) -> None:
        _require_positive("median_days", self.median_days)
        _require_positive("longest_days", self.longest_days)
        _require_share("together_share", self.together_share)
        if not 0 <= self.spread <= 10:
            raise ConfigError(f"spread {self.spread} of repairs must be from 0 to 10")

    def draw_s(self, generator: random.Random) -> float:
        """Return the seconds of an outage, at least 1."""
        days = self.median_days * generator.lognormvariate(0.0, self.spread)
        return max(min(days, self.longest_days) * _DAY_S, _SHORTEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Workers that are slow for a while: a Poisson process, exponential durations, uniform speeds.

    Attributes:
        slowest, fastest: shares of the normal speed.
    """

    per_1000_worker_days: float
    mean_hours: float = 2.0
    slowest: float = 0.5
    fastest: float = 0.9

    def __post_init__(self) -> None:
        _require_positive("per_1000_worker_days", self.per_1000_worker_days)
        _require_positive("mean_hours", self.mean_hours)
        if not 0 < self.slowest <= self.fastest < 1:
            raise ConfigError(
                f"slowest {self.slowest} and fastest {self.fastest} must be shares of the normal speed, above 0 and "
                "below 1, and slowest not above fastest"
            )

    def faults(self, workers: int, duration_s: float, generator: random.Random) -> list[Fault]:
        """Return the slow spells of the workers."""
        mean_gap_s = 1000 * _DAY_S / (self.per_1000_worker_days * workers)
        found = []
        for time_s, _ in Poisson().faults(duration_s, mean_gap_s, generator):
            worker = generator.randrange(workers)
            length_s = max(generator.expovariate(1 / (self.mean_hours * 3600)), _SHORTEST_S)
            speed = generator.uniform(self.slowest, self.fastest)
            found.append(Fault((worker,), time_s, time_s + length_s, speed, "slow"))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """Equal hosts that fail and are repaired.

    Attributes:
        single_share: share of the faults that take one worker; the others take all workers of a host.
    """

    faults_per_1000_host_days: float = 4.20
    arrivals: Weibull | Bursts = Bursts()
    repairs: Repairs = Repairs()
    single_share: float = 0.0
    stragglers: Stragglers | None = None

    def __post_init__(self) -> None:
        _require_positive("faults_per_1000_host_days", self.faults_per_1000_host_days)
        _require_share("single_share", self.single_share)

    def trace(self, *, hosts: int, workers_per_host: int, duration_s: float, seed: int) -> Trace:
        """Return a trace; see `generate_trace`."""
        workers = hosts * workers_per_host
        faults = self._losses(hosts, workers_per_host, duration_s, random.Random(f"losses {seed}"))
        if self.stragglers is not None:
            faults += self.stragglers.faults(workers, duration_s, random.Random(f"stragglers {seed}"))
        name = f"{type(self.arrivals).__name__.lower()}, seed {seed}"
        return Trace.from_faults(
            faults, workers=workers, duration_s=duration_s, workers_per_host=workers_per_host, name=name
        )

    def _losses(self, hosts: int, workers_per_host: int, duration_s: float, generator: random.Random) -> list[Fault]:
        mean_gap_s = 1000 * _DAY_S / (self.faults_per_1000_host_days * hosts)
        # The time at which each worker is back.
        back_s = [0.0] * (hosts * workers_per_host)
        # The end of the first fault of each incident.
        repaired_s: dict[int, float] = {}
        faults = []
        for time_s, incident in self.arrivals.faults(duration_s, mean_gap_s, generator):
            worker = _live_worker(back_s, time_s, generator)
            if worker is None:
                continue
            single = generator.random() < self.single_share
            first = worker if single else worker - worker % workers_per_host
            lost = range(first, first + (1 if single else workers_per_host))
            together = generator.random() < self.repairs.together_share
            end_s = time_s + self.repairs.draw_s(generator)
            if together and repaired_s.get(incident, 0.0) > time_s:
                end_s = repaired_s[incident]
            repaired_s.setdefault(incident, end_s)
            faults.append(Fault(tuple(lost), time_s, end_s, cause="worker" if single else "host"))
            for taken in lost:
                back_s[taken] = max(back_s[taken], end_s)
        return faults


def _live_worker(back_s: list[float], time_s: float, generator: random.Random) -> int | None:
    """Return a random live worker; None if there is none."""
    for _ in range(_TRIES):
        worker = generator.randrange(len(back_s))
        if back_s[worker] < time_s:
            return worker
    live = [worker for worker, end_s in enumerate(back_s) if end_s < time_s]
    return generator.choice(live) if live else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotModel:
    """Spot instances: hosts are removed in groups and places are filled in groups, each as a Poisson process.

    A removal takes random live hosts; a return fills the places that have been empty for longest.

    Attributes:
        removals_per_host_hour: hosts removed per hour, for each live host.
        returns_per_place_hour: hosts added per hour, for each missing host.
        removal_sizes, return_sizes: hosts in a group.
    """

    removals_per_host_hour: float = 0.56
    removal_sizes: IncidentSizes = IncidentSizes(exponent=2.715)
    returns_per_place_hour: float = 0.46
    return_sizes: IncidentSizes = IncidentSizes(exponent=3.6)

    def __post_init__(self) -> None:
        _require_positive("removals_per_host_hour", self.removals_per_host_hour)
        _require_positive("returns_per_place_hour", self.returns_per_place_hour)

    def trace(self, *, hosts: int, workers_per_host: int, duration_s: float, seed: int) -> Trace:
        """Return a trace; see `generate_trace`."""
        faults = [
            Fault(tuple(range(host * workers_per_host, (host + 1) * workers_per_host)), start_s, end_s, cause="removed")
            for host, start_s, end_s in self._absences(hosts, duration_s, random.Random(f"spot {seed}"))
        ]
        return Trace.from_faults(
            faults,
            workers=hosts * workers_per_host,
            duration_s=duration_s,
            workers_per_host=workers_per_host,
            name=f"spot, seed {seed}",
        )

    def _absences(self, hosts: int, duration_s: float, generator: random.Random) -> list[tuple[int, float, float]]:
        """Return (host, start_s, end_s) of each absence, by the rates of the moment (Gillespie's method)."""
        live = list(range(hosts))
        empty: deque[tuple[int, float]] = deque()
        absences: list[tuple[int, float, float]] = []
        removals, returns = self.removal_sizes.draws(generator), self.return_sizes.draws(generator)
        removal_mean, return_mean = self.removal_sizes.mean, self.return_sizes.mean
        time_s = 0.0
        while True:
            removals_per_s = self.removals_per_host_hour * len(live) / removal_mean / 3600
            returns_per_s = self.returns_per_place_hour * len(empty) / return_mean / 3600
            time_s += generator.expovariate(removals_per_s + returns_per_s)
            if time_s >= duration_s:
                return absences + [(host, start_s, math.inf) for host, start_s in empty]
            if generator.random() * (removals_per_s + returns_per_s) < removals_per_s:
                for _ in range(min(next(removals), len(live))):
                    empty.append((live.pop(generator.randrange(len(live))), time_s))
            else:
                for _ in range(min(next(returns), len(empty))):
                    host, start_s = empty.popleft()
                    absences.append((host, start_s, time_s))
                    live.append(host)


MODELS: Mapping[str, FaultModel | SpotModel] = MappingProxyType(
    {
        "bursts": FaultModel(),
        "poisson": FaultModel(arrivals=Poisson()),
        "weibull": FaultModel(arrivals=Weibull()),
        "spot": SpotModel(),
    }
)
"""The models by name, fitted to measured traces; see docs/traces.md."""


def generate_trace(
    model: FaultModel | SpotModel, *, hosts: int, workers_per_host: int = 1, duration_s: float, seed: int
) -> Trace:
    """Return a trace of `hosts` hosts, all live at first, drawn from `model`; equal seeds give equal traces.

    Raises:
        ConfigError: no hosts, no workers or no duration.
    """
    for what, count in (("hosts", hosts), ("workers_per_host", workers_per_host)):
        if count < 1:
            raise ConfigError(f"{what} {count} of a trace must be at least 1")
    _require_positive("duration_s", duration_s)
    return model.trace(hosts=hosts, workers_per_host=workers_per_host, duration_s=duration_s, seed=seed)
