"""Cuts near to those of a plan."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._effort import LOOK
from chameleon_ft.search._kinds import Crew
from chameleon_ft.search._nearby import _nearby, with_better_cuts
from chameleon_ft.search._placed import PlacedPipeline, synced_s
from chameleon_ft.search._timed import Timer
from tests.search.instances import instance, with_gradients
from tests.search.oracle import cuts


def problem(seed: int, *, memory: bool = False) -> tuple[CostModel, Timer, random.Random]:
    rng = random.Random(seed)
    costs = instance(rng, workers=8, layers=rng.randint(4, 8), micro_batches=8, kinds=1, memory=memory)
    costs = with_gradients(costs, rng)
    return costs, Timer(costs, Crew.of(costs.cluster), split_backward=rng.random() < 0.7), rng


def pipelines_of(timer: Timer, stops: tuple[int, ...], shares: list[int]) -> list[PlacedPipeline]:
    depth = len(stops)
    workers = [tuple(range(place * depth, (place + 1) * depth)) for place in range(len(shares))]
    return [
        PlacedPipeline(timer.timed(own, (0,) * depth, stops, share, effort=LOOK), own)
        for own, share in zip(workers, shares, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), memory=st.booleans())
def test_what_comes_out_is_no_slower_and_fits(seed: int, memory: bool) -> None:
    costs, timer, rng = problem(seed, memory=memory)
    depth = rng.randint(2, 4)
    fitting = [
        stops for stops in cuts(len(costs.workload.layers), depth) if timer.pipelines.fits((0,) * depth, stops, 4)
    ]
    if not fitting:
        return
    before = pipelines_of(timer, rng.choice(fitting), [4, 3])
    after = with_better_cuts(before, timer, effort=LOOK)
    assert synced_s(after, timer) <= synced_s(before, timer)
    assert [each.workers for each in after] == [each.workers for each in before]
    assert [each.timed.micro_batches for each in after] == [4, 3]
    assert len({each.timed.stops for each in after}) == 1, "what was cut alike still is"
    assert all(timer.pipelines.fits(each.timed.shape, each.timed.stops, each.timed.micro_batches) for each in after)


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_too_many_goes_to_another_stage(seed: int) -> None:
    costs, timer, _ = problem(seed)
    layers = len(costs.workload.layers)
    of_two = {stops: pipelines_of(timer, stops, [8])[0].timed.program_s for stops in cuts(layers, 2)}
    worst, best = max(of_two, key=of_two.__getitem__), min(of_two.values())
    found = worst
    for _ in range(layers):
        found = with_better_cuts(pipelines_of(timer, found, [8]), timer, effort=LOOK)[0].timed.stops
    assert of_two[found] < of_two[worst]
    assert of_two[found] <= best * 1.2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), memory=st.booleans())
def test_cuts_nearby_are_those_with_a_layer_moved(seed: int, memory: bool) -> None:
    costs, timer, rng = problem(seed, memory=memory)
    layers, depth = len(costs.workload.layers), rng.randint(2, 4)
    shape = (0,) * depth
    fitting = [stops for stops in cuts(layers, depth) if timer.pipelines.fits(shape, stops, 4)]
    if not fitting:
        return
    (timed,) = (each.timed for each in pipelines_of(timer, rng.choice(fitting), [4]))
    times, bounds = timer.pipelines.times[0], timer.pipelines.unsynced

    def sizes(stops: tuple[int, ...]) -> list[int]:
        return [stop - start for start, stop in zip((0, *stops), stops, strict=False)]

    def may_be_faster(stops: tuple[int, ...]) -> bool:
        work_s = max(float(times.work_s[start, stop]) for start, stop in zip((0, *stops), stops, strict=False))
        return 4 * work_s < timed.program_s and bounds.bound_s(shape, stops, 4) < timed.program_s

    wanted = [
        (bounds.bound_s(shape, stops, 4), stops)
        for stops in fitting
        if sum(abs(a - b) for a, b in zip(sizes(stops), sizes(timed.stops), strict=True)) == 2 and may_be_faster(stops)
    ]
    assert _nearby(timed, timer) == sorted(wanted)
