"""The events of the list scheduler as a binary heap, in the first `state.events` places of `Run.events`."""

from __future__ import annotations

from typing import Any

from chameleon_ft.schedule._kernels.scheduler_state import Run
from chameleon_ft.schedule.jit import no_refcount_inline
from chameleon_ft.schedule.records import Records


@no_refcount_inline
def push_event(run: Run, at_s: float, worker: int) -> None:
    """Add an event to the heap; simultaneous events are in the order of their workers."""
    events, place = run.events, run.state[0].events
    run.state[0].events += 1
    events[place].at_s, events[place].worker = at_s, worker
    while place and _is_before(events[place], events[(place - 1) // 2]):
        _swap(events, place, (place - 1) // 2)
        place = (place - 1) // 2


@no_refcount_inline
def pop_event(run: Run) -> tuple[float, int]:
    """Remove the first event from the heap."""
    events = run.events
    first = events[0].at_s, events[0].worker
    run.state[0].events -= 1
    count = run.state[0].events
    events[0] = events[count]
    place, least = -1, 0
    while least != place:
        place = least
        for below in range(2 * place + 1, min(count, 2 * place + 3)):
            if _is_before(events[below], events[least]):
                least = below
        if least != place:
            _swap(events, place, least)
    return first


@no_refcount_inline
def _is_before(one: Any, other: Any) -> bool:
    before: bool = one.at_s < other.at_s or (one.at_s == other.at_s and one.worker < other.worker)
    return before


@no_refcount_inline
def _swap(events: Records, one: int, other: int) -> None:
    at_s, worker = events[one].at_s, events[one].worker
    events[one] = events[other]
    events[other].at_s, events[other].worker = at_s, worker
