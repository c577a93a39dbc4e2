"""What a stage holds at the most, against the operations of programs under the same limits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.estimate import program_memory
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import InFlightLimit, Preference, Program, list_schedule
from chameleon_ft.search._memory import StageMemory
from tests.search.instances import instance
from tests.search.oracle import cuts, one_f_one_b


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    split=st.booleans(),
    prefer=st.sampled_from(Preference),
    extra=st.integers(0, 3),
)
def test_no_program_within_its_limits_holds_more(seed: int, split: bool, prefer: Preference, extra: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 5)
    costs = instance(rng, workers=layers, layers=layers, micro_batches=rng.randint(1, 9), kinds=1, memory=False)
    stops = rng.choice(list(cuts(layers, rng.randint(1, layers))))
    starts = (0, *stops[:-1])
    hops = tuple(Hop(number, LayerRange(*pair)) for number, pair in enumerate(zip(starts, stops, strict=True)))
    count = costs.workload.micro_batches
    plan = Plan(
        Placement(layers, {hop.worker: (hop.layers,) for hop in hops}),
        tuple(Route(number, hops) for number in range(count)),
        split,
    )
    limits = {}
    for hop in hops:
        in_flight = len(hops) - hop.worker + extra
        limits[hop.worker] = InFlightLimit(in_flight, in_flight + (rng.randint(0, 3) if split else 0))
    program = list_schedule(plan, costs, limits, prefer=prefer)
    memory = StageMemory(costs.workload, split_backward=split)
    for hop in hops:
        held = program_memory(program, plan.placement, costs.workload)[hop.worker].peak_bytes
        assert held <= memory.stage_bytes(hop.layers.start, hop.layers.stop, limits[hop.worker], count)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), in_flight=st.integers(1, 7))
def test_fused_backward_that_goes_to_its_limit_holds_as_much(seed: int, in_flight: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 5)
    costs = instance(rng, workers=layers, layers=layers, micro_batches=rng.randint(1, 9), kinds=1, memory=False)
    stops = rng.choice(list(cuts(layers, rng.randint(1, layers))))
    starts = (0, *stops[:-1])
    hops = tuple(Hop(number, LayerRange(*pair)) for number, pair in enumerate(zip(starts, stops, strict=True)))
    placement = Placement(layers, {hop.worker: (hop.layers,) for hop in hops})
    memory = StageMemory(costs.workload, split_backward=False)
    count = costs.workload.micro_batches
    for position, hop in enumerate(hops):
        order = one_f_one_b(Route(0, hops), position, in_flight, count)
        held = program_memory(Program({hop.worker: order}), placement, costs.workload)[hop.worker].peak_bytes
        said = memory.stage_bytes(hop.layers.start, hop.layers.stop, InFlightLimit(in_flight, in_flight), count)
        assert said == pytest.approx(held, abs=0)
