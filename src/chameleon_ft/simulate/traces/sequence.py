"""Whether events can follow one another."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_ft.simulate.traces.events import Event

__all__ = ["first_misfit"]


def first_misfit(events: Sequence[Event], workers: int, duration_s: float) -> tuple[int, str] | None:
    """Return (index, reason) of the first event that does not fit what came before it; None where all do."""
    last: dict[int, Event] = {}
    previous = (0.0, 0)
    for index, event in enumerate(events):
        misfits = (_misfit(event, worker, last.get(worker)) for worker in event.workers)
        problem = _misplaced(event, previous, workers, duration_s) or next(filter(None, misfits), None)
        if problem:
            return index, f"{event.kind} at {event.time_s} s: {problem}"
        previous = event.order
        last.update(dict.fromkeys(event.workers, event))
    return None


def _misplaced(event: Event, previous: tuple[float, int], workers: int, duration_s: float) -> str | None:
    if event.time_s > duration_s:
        return f"the trace ends before, at {duration_s} s; make it longer or leave the event out"
    if event.order < previous:
        return "it comes after a later one; sort by time and, at one time, by lost, back, slow"
    if event.workers[-1] >= workers:
        return f"worker {event.workers[-1]} is not one of 0..{workers - 1}"
    return None


def _misfit(event: Event, worker: int, last: Event | None) -> str | None:
    """Say why an event of a worker cannot follow the last one of that worker."""
    lost = last is not None and last.kind == "lost"
    speed = 1.0 if last is None else last.speed
    if lost != (event.kind == "back") or (event.kind == "slow" and event.speed == speed):
        state = "lost" if lost else f"up, at speed {speed:g}"
        return f"worker {worker} is {state} at that time; an event must change something"
    if last is not None and last.time_s == event.time_s and (last.kind, event.kind) != ("back", "slow"):
        return f"worker {worker} is {last.kind} at the same time; leave out one of the two"
    return None
