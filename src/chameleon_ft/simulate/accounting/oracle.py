"""The oracle, a bound for all policies: at every moment the highest rate that is known for the live workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.accounting.results import PolicyResult, Throughput
from chameleon_ft.simulate.traces.trace import Trace

ORACLE: Final = "oracle"

Live: TypeAlias = tuple[tuple[float, int], ...]
"""Number of live workers by speed, the fastest first."""


def live_of(speeds: Iterable[float]) -> Live:
    """Return the live workers with these speeds."""
    return tuple(sorted(Counter(speeds).items(), reverse=True))


class KnownRates:
    """Samples per second that some plan reaches, by its live workers.

    More or faster workers can do whatever fewer or slower ones can. So the best rate of live workers is the highest one
    noted for workers of which they have, for every speed, as many that are as fast.
    """

    def __init__(self) -> None:
        self._noted: dict[Live, float] = {}

    def note(self, live: Live, samples_per_s: float) -> None:
        """Add the rate of a plan on these workers. Raises ConfigError if it is not positive."""
        if not samples_per_s > 0:
            raise ConfigError(f"a plan trains a positive number of samples per second; got {samples_per_s}")
        self._noted[live] = max(samples_per_s, self._noted.get(live, 0.0))

    def best(self, live: Live) -> float:
        """Return the highest rate for these workers; 0 if none is known."""
        return max((rate for fewer, rate in self._noted.items() if _covers(live, fewer)), default=0.0)


def _covers(live: Live, fewer: Live) -> bool:
    """Return whether `live` has for every worker of `fewer` one of its own that is as fast."""
    return all(
        sum(count for own, count in live if own >= speed) >= sum(count for own, count in fewer if own >= speed)
        for speed, _ in fewer
    )


class Oracle:
    """The highest known rates for the live workers of a trace, without any stall.

    Args:
        trace: events of the workers.
        rates: the rates of all simulated policies.
        rate_of: samples per second of the fastest known plan for a number of equal workers; 0 if none fits.
    """

    def __init__(self, trace: Trace, rates: KnownRates, rate_of: Callable[[int], float]) -> None:
        self._trace = trace
        speeds = dict.fromkeys(range(trace.workers), 1.0)
        moments = [(0.0, live_of(speeds.values()))]
        for time_s, events in trace.groups():
            for event in events:
                for worker in event.workers:
                    if event.kind == "lost":
                        del speeds[worker]
                    else:
                        speeds[worker] = event.speed
            moments.append((time_s, live_of(speeds.values())))
        different = {live for _, live in moments}
        for live in different:
            if (rate := rate_of(dict(live).get(1.0, 0))) > 0:
                rates.note(live, rate)
        best = {live: rates.best(live) for live in different}
        ends_s = [*(time_s for time_s, _ in moments[1:]), trace.duration_s]
        # (start, seconds, live workers, samples per second)
        self._intervals = [
            (start_s, end_s - start_s, sum(count for _, count in live), best[live])
            for (start_s, live), end_s in zip(moments, ends_s, strict=True)
        ]
        self.samples = math.fsum(seconds * rate for _, seconds, _, rate in self._intervals)

    def result(self, failure_free_samples: float) -> PolicyResult:
        """Return the result of the oracle."""
        used_s = math.fsum(count * seconds for _, seconds, count, rate in self._intervals if rate)
        idle_s = math.fsum(count * seconds for _, seconds, count, rate in self._intervals if not rate)
        down_s = math.fsum(seconds for _, seconds, _, rate in self._intervals if not rate)
        duration_s, workers = self._trace.duration_s, self._trace.workers
        return PolicyResult(
            policy=ORACLE,
            workers=workers,
            duration_s=duration_s,
            samples=self.samples,
            failure_free_samples=failure_free_samples,
            oracle_samples=self.samples,
            useful_s=duration_s - down_s,
            down_s=down_s,
            used_hours=used_s / 3600,
            idle_hours=idle_s / 3600,
            dead_hours=workers * duration_s / 3600 - (used_s + idle_s) / 3600,
            timeline=tuple(Throughput(start_s, rate) for start_s, seconds, _, rate in self._intervals if seconds),
        )
