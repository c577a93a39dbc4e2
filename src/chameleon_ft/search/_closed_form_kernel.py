"""The inner loop of `search._closed_form`, compiled by numba; the names are those of the formula there."""

from __future__ import annotations

import math
from typing import NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Floats, Integers


@lean_kernel
def most_possible(
    speeds: Floats,
    work_s: float,
    ahead: float,
    ahead_of_sync: float,
    time_s: float,
    extra: float,
    guess: int,
    high: int,
) -> int:
    """The most micro-batches, up to `high`, that the formula allows.

    Args:
        speeds: of the workers, s_i.
        work_s: of a micro-batch, W.
        ahead, ahead_of_sync: share h of what comes before, of the operations and of gradient sync.
        time_s: until when, T.
        extra: what sync takes, in micro-batches, g.
        guess: where to look first.
        high: see above.
    """
    return _most_possible(speeds, work_s, ahead, ahead_of_sync, time_s, extra, guess, high)


class Formula(NamedTuple):
    """What is asked of many shapes.

    Attributes:
        speeds: of the workers of one shape after the other.
        ends: where they end.
        work_s, ahead, ahead_of_sync: as for one shape; nothing is ruled out where there is no work.
        extra: by shape.
        rates: micro-batches for each second that nothing can pass, by shape.
        enough: micro-batches that are not worth to be passed.
    """

    speeds: Floats
    ends: Integers
    work_s: float
    ahead: float
    ahead_of_sync: float
    extra: Floats
    rates: Floats
    enough: int


@lean_kernel
def most_possible_of_each(formula: Formula, time_s: float, found: Integers) -> None:
    """The same for many shapes; `found` is what was found last time, where to look first, and is filled in."""
    for shape in range(len(found)):
        found[shape] = most_possible_of(formula, shape, time_s, found[shape])


@lean_part
def most_possible_of(formula: Formula, shape: int, time_s: float, guess: int) -> int:
    """The same for one of them."""
    if not formula.work_s:
        return formula.enough
    start = formula.ends[shape - 1] if shape else 0
    # In all the time there is, the product is infinite.
    possible = time_s * formula.rates[shape]
    high = int(possible) if possible < formula.enough else formula.enough
    own = formula.speeds[start : formula.ends[shape]]
    extra = formula.extra[shape]
    return _most_possible(own, formula.work_s, formula.ahead, formula.ahead_of_sync, time_s, extra, guess, high)


@lean_part
def _most_possible(
    speeds: Floats,
    work_s: float,
    ahead: float,
    ahead_of_sync: float,
    time_s: float,
    extra: float,
    guess: int,
    high: int,
) -> int:
    low = 0
    for at in (guess, guess + 1):
        if low < at <= high:
            if _possible(speeds, work_s, ahead, ahead_of_sync, time_s, extra, at):
                low = at
            else:
                high = at - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _possible(speeds, work_s, ahead, ahead_of_sync, time_s, extra, middle):
            low = middle
        else:
            high = middle - 1
    return low


@lean_part
def _possible(
    speeds: Floats,
    work_s: float,
    ahead: float,
    ahead_of_sync: float,
    time_s: float,
    extra: float,
    micro_batches: int,
) -> bool:
    if micro_batches * work_s > time_s * _shared(speeds, ahead / micro_batches):
        return False
    count = micro_batches + extra
    return extra == 0.0 or count * work_s <= time_s * _shared(speeds, ahead_of_sync / count)


@lean_part
def _shared(speeds: Floats, head: float) -> float:
    """Sum of speed_i * product over j < i of (1 - head * speed_j / fastest)."""
    first = fastest = speeds[0]
    equal = True
    for speed in speeds:
        fastest = max(fastest, speed)
        equal = equal and speed == first
    if head > 0 and equal:
        shared: float = first * (1 - (1 - head) ** float(len(speeds))) / head
        return shared
    total, part = 0.0, 1.0
    for speed in speeds:
        total += speed * part
        part *= 1 - head * speed / fastest
    return total


@lean_kernel
def fill_largest(until_s: Floats, rest_s: Floats, largest_s: Floats) -> None:
    """By number of stages, what the stage with most work has at the least, whatever the cut.

    Args:
        until_s: work up to each layer.
        rest_s: room by layer.
        largest_s: by number of stages, to be filled in.
    """
    layers = len(until_s) - 1
    rest_s[:] = math.inf
    rest_s[layers] = largest_s[0] = 0.0
    for stages in range(1, layers + 1):
        # In place: what starts at a layer needs only what starts later, of one stage less.
        for start in range(layers + 1):
            least_s = math.inf
            for stop in range(start + 1, layers + 1):
                own_s = until_s[stop] - until_s[start]
                if own_s >= least_s:
                    break
                least_s = min(least_s, max(own_s, rest_s[stop]))
            rest_s[start] = least_s
        largest_s[stages] = rest_s[0]
