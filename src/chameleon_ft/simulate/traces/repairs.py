"""What becomes of a fault: how long an outage lasts, and workers that are slow rather than gone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.arrivals import Poisson, require_positive, require_share
from chameleon_ft.simulate.traces.trace import Fault

__all__ = ["Repairs", "Stragglers"]

_DAY_S = 86_400.0
_SHORTEST_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """How long an outage is: lognormal, but never above `longest_days`, when the host is replaced.

    Raises ConfigError where the values cannot be used.
    """

    median_days: float = 0.9
    spread: float = 2.2
    """Standard deviation of the logarithm; 0: every repair takes the median."""
    longest_days: float = 90.0
    together_share: float = 0.8
    """Share of the further faults of an incident that are repaired with the first of it, at the same moment."""

    def __post_init__(self) -> None:
        require_positive("median_days", self.median_days)
        require_positive("longest_days", self.longest_days)
        require_share("together_share", self.together_share)
        if not 0 <= self.spread <= 10:
            raise ConfigError(f"spread {self.spread} of repairs must be from 0 to 10")

    def draw_s(self, generator: random.Random) -> float:
        """Return the seconds of an outage, at least 1."""
        days = self.median_days * generator.lognormvariate(0.0, self.spread)
        return max(min(days, self.longest_days) * _DAY_S, _SHORTEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Workers that are slow for a while: a Poisson process, exponential lengths, speeds drawn evenly.

    Raises ConfigError where the values cannot be used.
    """

    per_1000_worker_days: float
    mean_hours: float = 2.0
    slowest: float = 0.5
    """Share of the normal speed."""
    fastest: float = 0.9
    """Share of the normal speed."""

    def __post_init__(self) -> None:
        require_positive("per_1000_worker_days", self.per_1000_worker_days)
        require_positive("mean_hours", self.mean_hours)
        if not 0 < self.slowest <= self.fastest < 1:
            raise ConfigError(
                f"slowest {self.slowest} and fastest {self.fastest} must be shares of the normal speed, above 0 and "
                "below 1, and slowest not above fastest"
            )

    def faults(self, workers: int, duration_s: float, generator: random.Random) -> list[Fault]:
        """Return when which worker is how slow."""
        mean_gap_s = 1000 * _DAY_S / (self.per_1000_worker_days * workers)
        faults = Poisson().faults(duration_s, mean_gap_s, generator)
        return [self._fault(time_s, workers, generator) for time_s, _ in faults]

    def _fault(self, time_s: float, workers: int, generator: random.Random) -> Fault:
        worker = generator.randrange(workers)
        length_s = max(generator.expovariate(1 / (self.mean_hours * 3600)), _SHORTEST_S)
        speed = generator.uniform(self.slowest, self.fastest)
        return Fault((worker,), time_s, time_s + length_s, speed, "slow")
