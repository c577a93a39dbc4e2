"""Traces by the seed: faults, repairs and slow workers drawn from models that are fitted to measured ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.arrivals import Arrivals, Bursts, Poisson, Weibull, require_positive, require_share
from chameleon_ft.simulate.traces.repairs import Repairs, Stragglers
from chameleon_ft.simulate.traces.spot import SpotModel
from chameleon_ft.simulate.traces.trace import Fault, Trace

__all__ = ["MODELS", "FaultModel", "generate_trace"]

_DAY_S = 86_400.0
_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """Hosts that fail, all alike, and are repaired. Raises ConfigError where the values cannot be used."""

    faults_per_1000_host_days: float = 4.20
    arrivals: Arrivals = field(default_factory=Bursts)
    repairs: Repairs = field(default_factory=Repairs)
    single_share: float = 0.0
    """Share of the faults that take one worker; the others take all workers of a host."""
    stragglers: Stragglers | None = None

    def __post_init__(self) -> None:
        require_positive("faults_per_1000_host_days", self.faults_per_1000_host_days)
        require_share("single_share", self.single_share)

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
        back_s = [0.0] * (hosts * workers_per_host)  # by worker
        repaired_s: dict[int, float] = {}  # by incident
        faults = []
        for time_s, incident in self.arrivals.faults(duration_s, mean_gap_s, generator):
            worker = _up_worker(back_s, time_s, generator)
            if worker is None:
                continue
            single = generator.random() < self.single_share
            first = worker if single else worker - worker % workers_per_host
            lost = range(first, first + (1 if single else workers_per_host))
            end_s = self._end_s(time_s, repaired_s.get(incident, 0.0), generator)
            repaired_s.setdefault(incident, end_s)
            faults.append(Fault(tuple(lost), time_s, end_s, cause="worker" if single else "host"))
            for taken in lost:
                back_s[taken] = max(back_s[taken], end_s)
        return faults

    def _end_s(self, time_s: float, first_s: float, generator: random.Random) -> float:
        """Return when a fault ends, where the first of its incident ends at `first_s`."""
        together = generator.random() < self.repairs.together_share
        own_s = time_s + self.repairs.draw_s(generator)
        return first_s if together and first_s > time_s else own_s


MODELS: Mapping[str, FaultModel | SpotModel] = MappingProxyType(
    {
        "bursts": FaultModel(),
        "poisson": FaultModel(arrivals=Poisson()),
        "weibull": FaultModel(arrivals=Weibull()),
        "spot": SpotModel(),
    }
)
"""The models by name, fitted to what was measured; see docs/traces.md."""


def generate_trace(
    model: FaultModel | SpotModel, *, hosts: int, workers_per_host: int = 1, duration_s: float, seed: int
) -> Trace:
    """Return a trace of `hosts` hosts, all up at first, drawn from `model`; the same seed gives the same trace.

    Raises ConfigError where the cluster or the duration is none.
    """
    for what, count in (("hosts", hosts), ("workers_per_host", workers_per_host)):
        if count < 1:
            raise ConfigError(f"{what} {count} of a trace must be at least 1")
    require_positive("duration_s", duration_s)
    return model.trace(hosts=hosts, workers_per_host=workers_per_host, duration_s=duration_s, seed=seed)


def _up_worker(back_s: list[float], time_s: float, generator: random.Random) -> int | None:
    """Return any worker that is up; None where none is."""
    for _ in range(_TRIES):
        worker = generator.randrange(len(back_s))
        if back_s[worker] < time_s:
            return worker
    up = [worker for worker, end_s in enumerate(back_s) if end_s < time_s]
    return generator.choice(up) if up else None
