"""Other cuts near to those of a plan: its slowest pipelines with a layer moved from one stage to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from chameleon_ft.search._bounds import Pipelines, Stops
from chameleon_ft.search._placed import PlacedPipeline, synced_s
from chameleon_ft.search._timed import TimedPipeline, Timer

# So many cuts are tried, those of least bound, and so often again from the best of them.
_TRIES: Final = 8
_ROUNDS: Final = 2


def with_better_cuts(pipelines: Sequence[PlacedPipeline], timer: Timer, *, effort: int) -> tuple[PlacedPipeline, ...]:
    """The same pipelines, the slowest and all that are cut like it with other cuts where that makes the step shorter.

    How long a pipeline takes differs by some hundredths between cuts whose bounds hardly do, and gradient sync depends
    on where the stages of all pipelines stop. `effort` is that of a look at a pipeline.
    """
    best = tuple(pipelines)
    for _ in range(_ROUNDS):
        slowest = max(best, key=lambda each: each.timed.program_s).timed
        before_s = synced_s(best, timer)
        ways = [_recut(best, slowest, stops, timer, effort) for _, stops in _nearby(slowest, timer)[:_TRIES]]
        found = min((way for way in ways if way is not None), key=lambda way: synced_s(way, timer), default=best)
        if synced_s(found, timer) >= before_s:
            break
        best = found
    return best


def _nearby(timed: TimedPipeline, timer: Timer) -> list[tuple[float, Stops]]:
    """All cuts in which one stage has a layer less, and another one more, with their bounds, by bound.

    Left out are those that do not fit, or cannot be faster, and those where one stage alone computes for as long as the
    whole takes now.
    """
    # Here, because to import a kernel loads numba, and most who import this run none.
    from chameleon_ft.search._nearby_kernel import fill_nearby

    pipelines, stops, depth = _bounds_of(timed, timer), timed.stops, len(timed.stops)
    window, place = pipelines.unsynced.window_of(timed.micro_batches)
    size, bounds_s = pipelines.num_layers + 1, np.empty((depth, depth))
    fill_nearby(
        pipelines.kernel_times(),
        pipelines.held(window, depth),
        np.array(timed.shape),
        np.array(stops),
        place,
        timed.micro_batches,
        timed.program_s,
        np.zeros((size, size)),
        np.empty(depth, np.int64),
        bounds_s,
    )
    found: list[tuple[float, Stops]] = []
    for less, more in np.argwhere(bounds_s < timed.program_s).tolist():
        low, high, shift = min(less, more), max(less, more), 1 if more < less else -1
        near = (*stops[:low], *(stop + shift for stop in stops[low:high]), *stops[high:])
        found.append((float(bounds_s[less, more]), near))
    return sorted(found)


def _bounds_of(timed: TimedPipeline, timer: Timer) -> Pipelines:
    return timer.recomputing if timed.recompute and timer.recomputing is not None else timer.pipelines


def _recut(
    pipelines: Sequence[PlacedPipeline], like: TimedPipeline, stops: Stops, timer: Timer, effort: int
) -> tuple[PlacedPipeline, ...] | None:
    """All pipelines that are cut like one with another cut; None if it does not fit one of them."""
    found: list[PlacedPipeline] = []
    for each in pipelines:
        timed = each.timed
        if (timed.shape, timed.stops, timed.recompute) == (like.shape, like.stops, like.recompute):
            if not _bounds_of(timed, timer).fits(timed.shape, stops, timed.micro_batches):
                return None
            timed = timer.timed(
                each.workers, timed.shape, stops, timed.micro_batches, recompute=timed.recompute, effort=effort
            )
        found.append(replace(each, timed=timed))
    return tuple(found)
