"""Memory and recomputation of stages, compared with the operations of programs."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_ft.cost.memory import program_memory
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, list_schedule
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import WorkerClass
from tests.examples import examples
from tests.search.instances import instance
from tests.search.oracle import cuts

seeds = st.integers(0, 2**32 - 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline with an option for each stage, on workers of drawn memory."""

    costs: CostModel
    stages: Stages
    cut_points: tuple[int, ...]
    options: tuple[int, ...]
    plan: Plan


def drawn(rng: random.Random, *, split: bool) -> Case | None:
    layers = rng.randint(1, 5)
    depth = rng.randint(1, layers)
    costs = instance(rng, workers=depth, layers=layers, micro_batches=rng.randint(1, 9), kinds=1, memory=False)
    cut_points = rng.choice(list(cuts(layers, depth)))
    hops = tuple(
        Hop(at, LayerRange(*pair)) for at, pair in enumerate(zip((0, *cut_points[:-1]), cut_points, strict=True))
    )
    state = max(
        sum(
            costs.workload.layers[layer].param_bytes + costs.workload.layers[layer].optimizer_bytes
            for layer in hop.layers
        )
        for hop in hops
    )
    classes = [WorkerClass(1.0, state + rng.randint(1, 60)) for _ in hops]
    stages = Stages(costs, classes, split_backward=split)
    choices = stages.options_of(tuple(range(depth)), cut_points)
    if not all(choices):
        return None
    options = tuple(rng.choice(own) for own in choices)
    recompute = {at: own for at, own in enumerate(stages.recomputed_layers(cut_points, options)) if own}
    plan = Plan(
        Placement(layers, {hop.worker: (hop.layers,) for hop in hops}),
        tuple(Route(number, hops) for number in range(costs.workload.micro_batches)),
        split,
        FrozenMap(recompute),
    )
    return Case(costs, stages, cut_points, options, plan)


@settings(max_examples=examples(300), deadline=None)
@given(seed=seeds, split=st.booleans(), forward_first=st.booleans())
def test_no_program_within_its_limits_exceeds_its_memory(seed: int, split: bool, forward_first: bool) -> None:
    case = drawn(random.Random(seed), split=split)
    if case is None:
        return
    shape = tuple(range(len(case.cut_points)))
    limits = case.stages.limits(shape, case.cut_points, case.options, case.plan.micro_batches)
    if limits is None:
        return
    in_flight_limits = dict(zip(shape, map(InFlightLimit, *limits.tolist()), strict=True))
    program = list_schedule(case.plan, case.costs, in_flight_limits, forward_first=forward_first)
    memory = program_memory(program, case.plan.placement, case.costs.workload)
    for worker, own in enumerate(case.stages.classes):
        assert own.memory_bytes is not None
        assert memory[worker].peak_bytes <= own.memory_bytes


@settings(max_examples=examples(300), deadline=None)
@given(seed=seeds, split=st.booleans(), more=st.integers(1, 3))
def test_no_program_exceeds_the_micro_batches_in_flight_of_an_option(seed: int, split: bool, more: int) -> None:
    rng = random.Random(seed)
    case = drawn(rng, split=split)
    if case is None:
        return
    at = rng.randrange(len(case.cut_points))
    most = int(case.stages.tables.options["in_flight"][case.options[at]])
    if most + more > case.plan.micro_batches:
        return
    # With as many in flight as there is not room for, whatever the rest of the pipeline does.
    limits = {worker: InFlightLimit(99, 99) for worker in case.plan.workers}
    limits[at] = InFlightLimit(most + more, most + more)
    program = list_schedule(case.plan, case.costs, limits)
    in_flight = reached = 0
    for operation in program.of(at):
        in_flight += {"F": 1, "B": -1, "I": -1, "W": 0}[operation.kind.value]
        reached = max(reached, in_flight)
    peak = program_memory(program, case.plan.placement, case.costs.workload)[at].peak_bytes
    capacity = case.stages.classes[at].memory_bytes
    assert capacity is not None
    assert reached <= most or peak > capacity


@settings(max_examples=examples(200), deadline=None)
@given(seed=seeds, split=st.booleans())
def test_options_recompute_more_to_have_more_in_flight(seed: int, split: bool) -> None:
    case = drawn(random.Random(seed), split=split)
    if case is None:
        return
    for own in case.stages.options_of(tuple(range(len(case.cut_points))), case.cut_points):
        rows = case.stages.tables.options[list(own)]
        recomputed = [(full, full + selective) for full, selective in rows[["full", "selective"]].tolist()]
        assert recomputed == sorted(set(recomputed))
        assert (np.diff(rows["in_flight"]) >= 0).all()


def test_unknown_memory_allows_everything() -> None:
    costs = instance(random.Random(1), workers=2, layers=3, micro_batches=4, kinds=1, memory=False)
    stages = Stages(costs, [WorkerClass(1.0, None)], split_backward=True)
    assert not stages.limited
    assert stages.fits.all(where=~stages.fits.transpose(0, 2, 1) & (stages.min_bytes(0) >= 0))
    limits = stages.limits((0, 0), (1, 3), (0, 0), 4)
    assert limits is not None
    assert limits[0].tolist() == [4, 3]


@pytest.mark.parametrize("split", [False, True])
def test_one_byte_less_than_a_stage_needs_is_too_little(split: bool) -> None:
    costs = instance(random.Random(7), workers=1, layers=3, micro_batches=2, kinds=1, memory=False)
    needed = int(Stages(costs, [WorkerClass(1.0, 2**40)], split_backward=split).min_bytes(0)[0, 3])
    # With so much room nothing has to be recomputed; with the least, as much as there is.
    least = min(
        int(Stages(costs, [WorkerClass(1.0, memory)], split_backward=split).fits[0, 0, 3]) * memory or 2**40
        for memory in range(1, needed + 1)
    )
    assert least <= needed
    assert not Stages(costs, [WorkerClass(1.0, least - 1)], split_backward=split).fits[0, 0, 3]
