"""More or fewer faults of the same kind."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from chameleon_ft.simulate.traces.events import Fault

__all__ = ["BURST_GAP_S", "repeated", "thinned"]

BURST_GAP_S = 300.0
"""Faults that follow one another by less are one incident."""


def repeated(
    faults: Sequence[Fault],
    rate_factor: float,
    *,
    down: Iterable[Fault],
    hosts: int,
    workers_per_host: int,
    duration_s: float,
    generator: random.Random,
) -> list[Fault]:
    """Return `faults` starting `rate_factor` times as often, over and over until `duration_s`, and just as long.

    Every round but the first is on hosts in another order. A fault that would hit workers that an earlier one still
    holds, or one of `down`, hits a host that is up; where there is none, nothing.
    """
    back_s = [0.0] * (hosts * workers_per_host)
    for fault in down:
        _hold(back_s, fault)
    order = list(range(hosts))
    found = []
    for copy in range(math.ceil(rate_factor)):
        for fault in faults:
            start_s = (copy * duration_s + fault.start_s) / rate_factor
            end_s = start_s + min(fault.end_s, duration_s) - fault.start_s
            if not start_s < min(end_s, duration_s):
                continue
            if workers := _moved(fault, start_s, order, back_s, workers_per_host, generator):
                found.append(replace(fault, workers=workers, start_s=start_s, end_s=end_s))
                _hold(back_s, found[-1])
        generator.shuffle(order)
    return found


def thinned(faults: Sequence[Fault], share: float, generator: random.Random) -> list[Fault]:
    """Return a share of the incidents, each whole."""
    incidents: list[list[Fault]] = []
    last_s = -math.inf
    for fault in faults:
        if fault.start_s - last_s >= BURST_GAP_S:
            incidents.append([])
        incidents[-1].append(fault)
        last_s = fault.start_s
    kept = generator.sample(incidents, round(share * len(incidents)))
    return [fault for incident in kept for fault in incident]


def _hold(back_s: list[float], fault: Fault) -> None:
    if fault.speed == 0:
        for worker in fault.workers:
            back_s[worker] = max(back_s[worker], fault.end_s)


def _moved(
    fault: Fault, start_s: float, order: list[int], back_s: list[float], workers_per_host: int, generator: random.Random
) -> tuple[int, ...]:
    """Return the workers that a fault hits, each in its place on another host."""
    places: dict[int, list[int]] = {}
    for worker in fault.workers:
        host, place = divmod(worker, workers_per_host)
        places.setdefault(host, []).append(place)
    moved: dict[int, list[int]] = {}
    for host, own in places.items():
        targets = itertools.chain((order[host],), _shuffled(order, generator))
        free = (t for t in targets if t not in moved and not _held(t, own, start_s, back_s, workers_per_host))
        if (target := next(free, None)) is not None:
            moved[target] = own
    return tuple(sorted(target * workers_per_host + place for target, own in moved.items() for place in own))


def _shuffled(order: list[int], generator: random.Random) -> Iterator[int]:
    """Yield the hosts in any order, which is drawn only when the first of them is asked for."""
    yield from generator.sample(order, len(order))


def _held(host: int, places: list[int], time_s: float, back_s: list[float], workers_per_host: int) -> bool:
    # A loss at the very moment of a return would be no event.
    return any(back_s[host * workers_per_host + place] >= time_s for place in places)
