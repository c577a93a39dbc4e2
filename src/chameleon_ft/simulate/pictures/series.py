"""Series for pictures: throughput in bins of time, live workers, and what policies lack."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chameleon_ft.simulate.accounting.results import PolicyResult, Throughput
from chameleon_ft.simulate.traces.trace import Trace

__all__ = ["MISSING", "binned", "live_workers", "losses_s", "missing"]

MISSING = ("slower steps", "stalls", "work in vain", "checkpoints", "too few workers")
"""What a policy can lack, in the order of `missing`."""


def binned(timeline: Sequence[Throughput], duration_s: float, bins: int) -> list[float]:
    """Mean samples per second in equal parts of the time; before the first entry of a timeline there are none."""
    width_s = duration_s / bins
    sums = [0.0] * bins
    ends = [*(each.time_s for each in timeline[1:]), duration_s]
    for each, end_s in zip(timeline, ends, strict=False):
        at_s = each.time_s
        while each.samples_per_s and at_s < end_s:
            index = min(bins - 1, int(at_s / width_s))
            until_s = end_s if index == bins - 1 else min(end_s, (index + 1) * width_s)
            # A time just below the end of a bin may be rounded into it.
            until_s = max(until_s, math.nextafter(at_s, math.inf))
            sums[index] += (until_s - at_s) * each.samples_per_s
            at_s = until_s
    return [total / width_s for total in sums]


def live_workers(trace: Trace) -> tuple[list[float], list[int]]:
    """(times, live workers from then on), up to the end of the trace."""
    times, counts, live = [0.0], [trace.workers], trace.workers
    for time_s, events in trace.groups():
        live += sum({"lost": -1, "back": 1}.get(event.kind, 0) * len(event.workers) for event in events)
        times.append(time_s)
        counts.append(live)
    return [*times, trace.duration_s], [*counts, live]


def losses_s(trace: Trace) -> list[float]:
    """When workers were lost, those left out that were not there from the start."""
    return [time_s for time_s, events in trace.groups() if time_s and any(event.kind == "lost" for event in events)]


def missing(own: PolicyResult) -> tuple[float, ...]:
    """Shares of the failure-free samples that a policy lacks, by the names of `MISSING`.

    Time in which nothing was gained counts as at the failure-free rate; the rest is what steps took longer.
    """
    in_time = [own.stall_s, own.lost_s, own.checkpoint_s, own.down_s]
    shares = [seconds / own.duration_s for seconds in in_time]
    return max(0.0, 1.0 - own.share_of_failure_free - math.fsum(shares)), *shares
