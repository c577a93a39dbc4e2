"""The workers of a trace that are live at a time."""

from __future__ import annotations

from chameleon_ft.simulate import Trace


def live_at(trace: Trace, time_s: float) -> set[int]:
    """Return the workers that are live after the events of that time."""
    live = set(range(trace.workers))
    for event in trace.events:
        if event.time_s <= time_s:
            live = live - set(event.workers) if event.kind == "lost" else live | set(event.workers)
    return live
