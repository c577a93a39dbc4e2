"""The inner loop of `search._nearby`, compiled by numba."""

from __future__ import annotations

import math

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Floats, Integers
from chameleon_ft.search._bounds_kernel import Held, Times, cut_s, has_room, stage_work_s


@lean_kernel
def fill_nearby(
    times: Times,
    held: Held,
    shape: Integers,
    stops: Integers,
    place: int,
    count: int,
    most_s: float,
    sync_s: Floats,
    near: Integers,
    bounds_s: Floats,
) -> None:
    """Fill in the bounds of all cuts in which one stage has a layer less, and another one more, by these stages.

    Args:
        times, held, shape, stops, place, count, sync_s: as for `cut_s`; `stops` are those that others are near to.
        most_s: no stage may compute for so long. Where one does, or the cut does not fit, its bound is infinite.
        near: room by stage.
        bounds_s: to be filled in.
    """
    depth = len(stops)
    for less in range(depth):
        for more in range(depth):
            bounds_s[less, more] = math.inf
            shift = 1 if more < less else -1
            for stage in range(depth):
                moves = min(less, more) <= stage < max(less, more)
                near[stage] = stops[stage] + (shift if moves else 0)
            if less != more and _is_possible(times, held, shape, near, count, most_s):
                bounds_s[less, more] = cut_s(times, held, shape, near, place, count, sync_s)


@lean_part
def _is_possible(times: Times, held: Held, shape: Integers, stops: Integers, count: int, most_s: float) -> bool:
    start = 0
    for stage in range(len(stops)):
        kind, stop = shape[stage], stops[stage]
        if stop <= start or count * stage_work_s(times, kind, start, stop) >= most_s:
            return False
        if not has_room(held, kind, len(stops) - stage, count, start, stop):
            return False
        start = stop
    return True
