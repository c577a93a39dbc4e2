"""The bound that no policy passes: at every moment the highest rate that is known for the live workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from chameleon_ft.errors import ConfigError

__all__ = ["KnownRates", "Live", "live_of"]

Live: TypeAlias = tuple[tuple[float, int], ...]
"""How many workers are live, by speed, the fastest first."""


def live_of(speeds: Iterable[float]) -> Live:
    """The live workers by their speeds."""
    return tuple(sorted(Counter(speeds).items(), reverse=True))


class KnownRates:
    """Samples per second that some plan reaches, by the workers that it has.

    What can be done with some workers can be done with more, or with faster ones. So the best rate of live workers is
    the highest of any that was noted for workers of whom they have, for every speed, as many that are as fast.
    """

    def __init__(self) -> None:
        self._noted: dict[Live, float] = {}
        self._best: dict[Live, float] = {}

    def note(self, live: Live, samples_per_s: float) -> None:
        """A plan of these workers trains so many samples per second.

        Raises ConfigError for a rate that is not positive.
        """
        if not samples_per_s > 0:
            raise ConfigError(f"a plan trains a positive number of samples per second; got {samples_per_s}")
        if samples_per_s > self._noted.get(live, 0.0):
            self._noted[live] = samples_per_s
            self._best.clear()

    def best(self, live: Live) -> float:
        """The highest rate for these workers; 0 where none is known."""
        if live not in self._best:
            rates = (rate for fewer, rate in self._noted.items() if _covers(live, fewer))
            self._best[live] = max(rates, default=0.0)
        return self._best[live]


def _covers(live: Live, fewer: Live) -> bool:
    """Whether for every worker of `fewer` there is one of its own in `live` that is as fast."""
    return all(
        sum(count for own, count in live if own >= speed) >= sum(count for own, count in fewer if own >= speed)
        for speed, _ in fewer
    )
