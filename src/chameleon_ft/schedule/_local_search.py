"""Shorter orders from good ones: operations on the longest path change places.

A step gets shorter only if its longest path does. That path is made of blocks: operations which follow each other
without a pause on one worker. The neighbours of a schedule are those in which an operation goes to the front or to the
end of its block (as in job-shop scheduling: Dell'Amico and Trubian 1993), or changes places with one of its kind that
comes before: where limits are tight, a forward is too late because another took the room. The search goes on from the
best neighbour, also where that is longer than what it came from, but to none that it has been at, and keeps the best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from chameleon_ft.schedule._engine import Rules, Schedule, replayed

# In plans so large that a search would hardly begin, there is none; there a list schedule alone is close to the bound.
_LEAST_REPLAYS: Final = 100


def is_too_large(operations: int, effort: int) -> bool:
    """Whether a search of this effort would hardly begin."""
    return operations * _LEAST_REPLAYS > effort


def shortened(found: Schedule, rules: Rules, *, enough_s: float, effort: int) -> Schedule:
    """A schedule that takes no longer than `found` and keeps within the limits of `rules`, as `found` must.

    The search ends at `enough_s`, when there is nothing left to try, or when `effort` operations have been
    replayed.
    """
    network = found.network
    if is_too_large(len(network.operations), effort):
        return found
    from chameleon_ft.schedule._kernels.replays import shortened_codes

    codes = shortened_codes(
        network.slots,
        network.channels,
        network.operations,
        found.codes,
        network.first,
        np.array(rules.in_flight),
        np.array(rules.kept),
        network.split_backward,
        enough_s,
        effort,
    )
    better = replayed(network, codes)
    return replace(found, codes=codes, ends_s=better.ends_s, step_s=better.step_s)
