"""What a trace is like, in figures that can be set beside those of other traces."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.simulate.traces.trace import BURST_GAP_S, Trace

__all__ = ["TraceStatistics", "trace_statistics"]

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Figures of a trace; nan where it has too few faults for one.

    A fault is the loss of a host or of workers on it; a loss on several hosts is as many faults. What is lost at time
    0 is how the trace begins and no fault. Outages that have not ended with the trace are in none of the figures of
    outages, so those of a short trace are too short.
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
    """Standard deviation of the times between faults over their mean; 1 for a Poisson process."""
    short_gap_share: float
    """Share of the times between faults that are below `BURST_GAP_S`."""
    most_hosts_down: int
    """The most hosts that have lost a worker at one time."""
    availability: float
    """Share of the worker-hours that workers are up, slow ones too."""
    slow_share: float
    """Share of the worker-hours that workers are up but slow."""


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Return the figures of a trace."""
    faults = [fault for fault in trace.faults() if fault.speed == 0]
    spans = sorted(
        (fault.start_s, fault.end_s, host)
        for fault in faults
        for host in {trace.host_of(worker) for worker in fault.workers}
    )
    begun = [span for span in spans if span[0] > 0]
    outages = [(end_s - start_s) / _DAY_S for start_s, end_s, _ in begun if end_s <= trace.duration_s]
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(begun)]
    total_h = trace.workers * trace.duration_s / 3600
    return TraceStatistics(
        hosts=trace.hosts,
        workers=trace.workers,
        duration_days=trace.duration_s / _DAY_S,
        faults=len(begun),
        faults_per_1000_host_days=1000 * len(begun) / (trace.hosts * trace.duration_s / _DAY_S),
        outage_median_days=_quantile(outages, 0.5),
        outage_mean_days=statistics.fmean(outages) if outages else math.nan,
        outage_p90_days=_quantile(outages, 0.9),
        gap_variation=_variation(gaps),
        short_gap_share=sum(gap < BURST_GAP_S for gap in gaps) / len(gaps) if gaps else math.nan,
        most_hosts_down=_most_hosts_down(spans),
        availability=trace.up_worker_hours / total_h,
        slow_share=_slow_hours(trace) / total_h,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, between values by straight lines, and of none nan."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _variation(gaps: Sequence[float]) -> float:
    mean = statistics.fmean(gaps) if gaps else 0.0
    return statistics.pstdev(gaps) / mean if mean > 0 else math.nan


def _most_hosts_down(spans: Sequence[tuple[float, float, int]]) -> int:
    """Return the most different hosts in spans of (start_s, end_s, host) at one time."""
    starts = [(start_s, 1, host) for start_s, _, host in spans]
    ends = [(end_s, -1, host) for _, end_s, host in spans]
    down: dict[int, int] = {}
    most = 0
    for _, change, host in sorted(starts + ends):
        down[host] = down.get(host, 0) + change
        if down[host] == 0:
            del down[host]
        most = max(most, len(down))
    return most


def _slow_hours(trace: Trace) -> float:
    slow = (fault for fault in trace.faults() if fault.speed > 0)
    return math.fsum(len(fault.workers) * (min(fault.end_s, trace.duration_s) - fault.start_s) / 3600 for fault in slow)
