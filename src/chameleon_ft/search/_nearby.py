"""Other cuts near to those of a plan: its slowest pipelines with a layer moved from one stage to another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from chameleon_ft.search._bounds import Pipelines, Stops, SyncCost
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
        nearby = sorted(
            (bound_s, stops)
            for stops in _nearby(slowest.stops)
            if (bound_s := _bound_s(slowest, stops, timer)) < slowest.program_s
        )
        before_s = synced_s(best, timer)
        ways = [_recut(best, slowest, stops, timer, effort) for _, stops in nearby[:_TRIES]]
        found = min((way for way in ways if way is not None), key=lambda way: synced_s(way, timer), default=best)
        if synced_s(found, timer) >= before_s:
            break
        best = found
    return best


def _nearby(stops: Stops) -> Iterator[Stops]:
    """All cuts in which one stage has a layer less, and another one more."""
    for less in range(len(stops)):
        for more in range(len(stops)):
            low, high = min(less, more), max(less, more)
            shift = 1 if more < less else -1
            found = (*stops[:low], *(stop + shift for stop in stops[low:high]), *stops[high:])
            if less != more and all(a < b for a, b in zip((0, *found), found, strict=False)):
                yield found


def _bound_s(timed: TimedPipeline, stops: Stops, timer: Timer) -> float:
    """Seconds below which the pipeline cannot be with this cut; infinite where that does not fit, or where one stage
    alone computes for as long as the whole takes now.
    """
    pipelines = _bounds_of(timed, timer)
    shape, micro_batches = timed.shape, timed.micro_batches
    stages = zip(shape, (0, *stops), stops, strict=False)
    work_s = micro_batches * max(pipelines.times[kind].work_s[start, stop] for kind, start, stop in stages)
    if work_s >= timed.program_s or not pipelines.fits(shape, stops, micro_batches):
        return math.inf
    return pipelines.bounds(SyncCost()).bound_s(shape, stops, micro_batches)


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
