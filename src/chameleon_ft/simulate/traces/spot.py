"""Spot instances: taken away several at once, given back as there are any."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from chameleon_ft.simulate.traces.arrivals import IncidentSizes, require_positive
from chameleon_ft.simulate.traces.trace import Fault, Trace

__all__ = ["SpotModel"]

_REMOVALS = IncidentSizes(exponent=2.715)
_RETURNS = IncidentSizes(exponent=3.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotModel:
    """Hosts that are removed in groups and places that are filled in groups, each as a Poisson process.

    A removal takes any hosts that are up, a return fills the places that have been empty for longest. Raises
    ConfigError where the values cannot be used.
    """

    removals_per_host_hour: float = 0.56
    """Hosts removed per hour, for each that is up."""
    removal_sizes: IncidentSizes = _REMOVALS
    returns_per_place_hour: float = 0.46
    """Hosts added per hour, for each that is missing."""
    return_sizes: IncidentSizes = _RETURNS

    def __post_init__(self) -> None:
        require_positive("removals_per_host_hour", self.removals_per_host_hour)
        require_positive("returns_per_place_hour", self.returns_per_place_hour)

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
        up = list(range(hosts))
        empty: deque[tuple[int, float]] = deque()
        absences: list[tuple[int, float, float]] = []
        removals, returns = self.removal_sizes.draws(generator), self.return_sizes.draws(generator)
        removal_mean, return_mean = self.removal_sizes.mean, self.return_sizes.mean
        time_s = 0.0
        while True:
            removals_per_s = self.removals_per_host_hour * len(up) / removal_mean / 3600
            returns_per_s = self.returns_per_place_hour * len(empty) / return_mean / 3600
            time_s += generator.expovariate(removals_per_s + returns_per_s)
            if time_s >= duration_s:
                return absences + [(host, start_s, float("inf")) for host, start_s in empty]
            if generator.random() * (removals_per_s + returns_per_s) < removals_per_s:
                for _ in range(min(next(removals), len(up))):
                    empty.append((up.pop(generator.randrange(len(up))), time_s))
            else:
                for _ in range(min(next(returns), len(empty))):
                    host, start_s = empty.popleft()
                    absences.append((host, start_s, time_s))
                    up.append(host)
