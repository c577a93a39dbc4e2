"""Hypothesis strategies for faults and traces, on a grid of half seconds so that things often happen at one time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from chameleon_ft.simulate.traces.trace import Fault, Trace

GRID_S = 0.5
LAST = 40
DURATION_S = LAST * GRID_S
GRID = [step * GRID_S for step in range(LAST + 1)]


@dataclass(frozen=True, slots=True)
class Case:
    """Faults and the trace that is made of them."""

    faults: tuple[Fault, ...]
    trace: Trace

    def speed(self, worker: int, time_s: float) -> float:
        """The speed of a worker by definition: that of the worst fault that holds it."""
        return min((f.speed for f in self.faults if worker in f.workers and f.start_s <= time_s < f.end_s), default=1.0)


@st.composite
def faults(draw: st.DrawFn, workers: int) -> Fault:
    taken = draw(st.sets(st.integers(0, workers - 1), min_size=1))
    start = draw(st.integers(0, LAST))
    length = draw(st.one_of(st.just(math.inf), st.integers(1, LAST)))
    speed = draw(st.sampled_from([0.0, 0.0, 0.25, 0.5]))
    cause = draw(st.sampled_from(["", "gpu", "link"]))
    return Fault(tuple(sorted(taken)), start * GRID_S, (start + length) * GRID_S, speed, cause)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    hosts, workers_per_host = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    workers = hosts * workers_per_host
    drawn = draw(st.lists(faults(workers), max_size=12))
    return Case(tuple(drawn), trace_of(drawn, workers=workers, workers_per_host=workers_per_host))


def trace_of(
    drawn: Sequence[Fault], *, workers: int, workers_per_host: int = 1, duration_s: float = DURATION_S
) -> Trace:
    return Trace.from_faults(
        drawn, workers=workers, duration_s=duration_s, workers_per_host=workers_per_host, name="drawn"
    )


def speeds(trace: Trace, time_s: float) -> list[float]:
    """The speed of each worker at a time, 0 where it is lost, by the events up to then."""
    found = [1.0] * trace.workers
    for event in trace.events:
        if event.time_s <= time_s:
            for worker in event.workers:
                found[worker] = 0.0 if event.kind == "lost" else event.speed
    return found
