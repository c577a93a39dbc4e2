"""Shorter schedules from other ranks: which micro-batch goes first where several wait for a worker.

The order of the micro-batches on one worker binds that on the next, because messages keep their order. So a better one
is not found by changing one worker's: a micro-batch goes before or after others everywhere, and the engine does the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from chameleon_ft.schedule._engine import Rules, Schedule
from chameleon_ft.schedule._orders import schedule

# There is no search in plans so large that it would hardly begin.
_LEAST_TRIALS: Final = 50

# By how many places a micro-batch goes forward or back; besides, it goes first of all and last of all.
_STEPS: Final = (2, 4)

# The first slots of routes, in the order of their ranks.
_Ways = tuple[int, ...]


def reranked(found: Schedule, rules: Rules, *, enough_s: float, effort: int) -> Schedule:
    """A schedule under `rules` that takes no longer than `found`, which was made under them by the usual ranks.

    First improvements are taken until there is none, or the time is `enough_s`, or `effort` operations have been
    scheduled.
    """
    network = found.network
    trials = effort // len(network.operations)
    if trials < _LEAST_TRIALS:
        return found
    best, ways = found, tuple(network.ways_by_place().tolist())
    seen = {ways}
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(ways):
            if trials == 0 or best.step_s <= enough_s:
                return best
            if neighbour in seen:
                continue
            seen.add(neighbour)
            trials -= 1
            trial = schedule(network, rules, np.array(neighbour))
            if trial.step_s < best.step_s and not trial.beyond_limits:
                best, ways, improved = trial, neighbour, True
                break
    return best


def _neighbours(ways: _Ways) -> Iterator[_Ways]:
    """One way goes first, last, or some places forward or back."""
    last = len(ways) - 1
    for place, way in enumerate(ways):
        rest = ways[:place] + ways[place + 1 :]
        targets = (0, *(place - step for step in reversed(_STEPS)), *(place + step for step in _STEPS), last)
        for target in targets:
            if 0 <= target <= last and target != place:
                yield (*rest[:target], way, *rest[target:])
