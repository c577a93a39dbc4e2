"""When faults come: three kinds of processes with the same rate and more or less order in them."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.trace import BURST_GAP_S

__all__ = ["Arrivals", "Bursts", "IncidentSizes", "Poisson", "Weibull", "require_positive", "require_share"]


class Arrivals(Protocol):
    """A process that faults come by."""

    def faults(self, duration_s: float, mean_gap_s: float, generator: random.Random) -> list[tuple[float, int]]:
        """Return (time_s, incident) of the faults before `duration_s`, ascending, every `mean_gap_s` on average.

        Faults with the same number of an incident have one cause.
        """


@dataclass(frozen=True, slots=True)
class Poisson:
    """Faults that know nothing of one another: the gaps are exponential."""

    def faults(self, duration_s: float, mean_gap_s: float, generator: random.Random) -> list[tuple[float, int]]:
        """Return when faults come, each an incident; see `Arrivals`."""
        return Weibull(shape=1.0).faults(duration_s, mean_gap_s, generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """Independent gaps with a Weibull distribution. Raises ConfigError where the shape cannot be one."""

    shape: float = 0.59
    """Below 1, gaps vary more than those of a Poisson process; 1 is that process; above, they are more even."""

    def __post_init__(self) -> None:
        if not 0.2 <= self.shape <= 20:
            raise ConfigError(f"shape {self.shape} of Weibull gaps must be from 0.2 to 20; 1 is a Poisson process")

    def faults(self, duration_s: float, mean_gap_s: float, generator: random.Random) -> list[tuple[float, int]]:
        """Return when faults come, each an incident; see `Arrivals`."""
        scale_s = mean_gap_s / math.gamma(1 + 1 / self.shape)
        faults: list[tuple[float, int]] = []
        time_s = generator.weibullvariate(scale_s, self.shape)
        while time_s < duration_s:
            faults.append((time_s, len(faults)))
            time_s += generator.weibullvariate(scale_s, self.shape)
        return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSizes:
    """How many faults are one incident: n with a probability that falls as n ** -exponent, up to `largest`.

    Raises ConfigError where the values cannot be used.
    """

    exponent: float
    largest: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.exponent <= 20:
            raise ConfigError(f"exponent {self.exponent} of incident sizes must be from 1 to 20; higher is smaller")
        if not 1 <= self.largest <= 10_000:
            raise ConfigError(f"largest incident {self.largest} must be from 1 to 10000 faults")

    @property
    def mean(self) -> float:
        """Faults per incident."""
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

    Raises ConfigError where the values cannot be used.
    """

    gaps: Weibull = Weibull(shape=0.625)
    """Of the first faults of incidents."""
    sizes: IncidentSizes = IncidentSizes(exponent=3.9)
    """Faults per incident."""
    simultaneous_share: float = 0.65
    """Share of the further faults of an incident that come with the first; the others come at any time of the burst."""

    def __post_init__(self) -> None:
        require_share("simultaneous_share", self.simultaneous_share)

    def faults(self, duration_s: float, mean_gap_s: float, generator: random.Random) -> list[tuple[float, int]]:
        """Return when faults come; see `Arrivals`."""
        firsts = self.gaps.faults(duration_s, mean_gap_s * self.sizes.mean, generator)
        faults = list(firsts)
        sizes = self.sizes.draws(generator)
        for first_s, incident in firsts:
            faults += ((first_s + self._delay_s(generator), incident) for _ in range(next(sizes) - 1))
        return sorted(fault for fault in faults if fault[0] < duration_s)

    def _delay_s(self, generator: random.Random) -> float:
        together = generator.random() < self.simultaneous_share
        return 0.0 if together else BURST_GAP_S * generator.random()


def require_share(name: str, value: float) -> None:
    """Raise ConfigError where a value is no share."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} {value} must be a share, from 0 to 1")


def require_positive(name: str, value: float) -> None:
    """Raise ConfigError where a value is not a number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} {value} must be a number above 0")
