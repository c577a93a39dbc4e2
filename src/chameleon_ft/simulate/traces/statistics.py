"""Figures of a trace that can be compared with those of other traces."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass

import numpy as np

from chameleon_ft.simulate.traces.trace import BURST_GAP_S, Trace

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Figures of a trace; nan if it has too few faults for one.

    A fault is the loss of a host or of workers on it; a loss on several hosts is as many faults. Losses at time 0 are
    the initial state and no faults. Outages that outlast the trace are in none of the figures of outages, which are
    therefore too small for short traces.

    Attributes:
        gap_variation: standard deviation of the times between faults over their mean; 1 for a Poisson process.
        short_gap_share: share of the times between faults that are below `BURST_GAP_S`.
        most_hosts_down: the most hosts that have lost a worker at one time.
        availability: share of the worker-hours for which workers are live, slow or not.
        slow_share: share of the worker-hours for which workers are live but slow.
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
    short_gap_share: float
    most_hosts_down: int
    availability: float
    slow_share: float


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Return the figures of a trace."""
    spans = sorted(
        (fault.start_s, fault.end_s, host)
        for fault in trace.faults()
        if fault.speed == 0
        for host in set(map(trace.host_of, fault.workers))
    )
    begun = [span for span in spans if span[0] > 0]
    outages = [(end_s - start_s) / _DAY_S for start_s, end_s, _ in begun if end_s <= trace.duration_s]
    median, p90 = map(float, np.quantile(outages, (0.5, 0.9))) if outages else (math.nan, math.nan)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(begun)]
    mean_gap_s = statistics.fmean(gaps) if gaps else 0.0
    total_h = trace.workers * trace.duration_s / 3600
    return TraceStatistics(
        hosts=trace.hosts,
        workers=trace.workers,
        duration_days=trace.duration_s / _DAY_S,
        faults=len(begun),
        faults_per_1000_host_days=1000 * len(begun) / (trace.hosts * trace.duration_s / _DAY_S),
        outage_median_days=median,
        outage_mean_days=statistics.fmean(outages) if outages else math.nan,
        outage_p90_days=p90,
        gap_variation=statistics.pstdev(gaps) / mean_gap_s if mean_gap_s > 0 else math.nan,
        short_gap_share=sum(gap < BURST_GAP_S for gap in gaps) / len(gaps) if gaps else math.nan,
        most_hosts_down=_most_hosts_down(spans),
        availability=trace.up_worker_hours / total_h,
        slow_share=trace.slow_worker_hours / total_h,
    )


def _most_hosts_down(spans: list[tuple[float, float, int]]) -> int:
    """Return the most different hosts in spans of (start_s, end_s, host) at one time."""
    changes = [(start_s, 1, host) for start_s, _, host in spans] + [(end_s, -1, host) for _, end_s, host in spans]
    faults_of_host: Counter[int] = Counter()
    down = most = 0
    for _, change, host in sorted(changes):
        before = faults_of_host[host]
        faults_of_host[host] += change
        down += (faults_of_host[host] > 0) - (before > 0)
        most = max(most, down)
    return most
