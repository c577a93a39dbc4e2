"""The memory of schedules, against that of the programs that are made of them."""

from __future__ import annotations

import dataclasses
import random
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.memory import needed_bytes, program_memory, workload_memory
from chameleon_ft.cost.presets import Recompute, device, model_shape
from chameleon_ft.cost.step import peak_bytes_of
from chameleon_ft.plan import PipelineLayout, Plan, RecomputedLayers, pipelines_plan
from chameleon_ft.schedule import CostModel, InFlightLimit, Program, list_schedule, pipeline_schedule
from chameleon_ft.schedule.best import ScheduledPart, best_parts, program_of
from chameleon_ft.schedule.network import pipeline_times
from chameleon_ft.schedule.records import components
from tests.lab.one_f_one_b import one_f_one_b
from tests.search.instances import instance
from tests.strategies import Planned, Shape, pipelines, planned, recomputing, some_recompute


def moving(plan: Plan, parts: list[ScheduledPart], costs: CostModel) -> dict[int, int]:
    """Return the peak memory of each worker, without its constant part."""
    state = workload_memory(costs.workload).state_bytes(plan.placement)
    memory = program_memory(program_of(plan, parts), plan.placement, costs.workload)
    return {worker: own.peak_bytes - state[worker] for worker, own in memory.items()}


@given(planned(), st.data())
def test_any_schedule_needs_what_its_program_does(case: Planned, data: st.DataObject) -> None:
    plan = data.draw(some_recompute(case.plan))
    parts = best_parts(plan, case.costs, effort=1)

    wanted = moving(plan, parts, case.costs)

    state = workload_memory(case.costs.workload).state_bytes(plan.placement)
    found = peak_bytes_of(plan, parts, case.costs)
    assert {worker: own - state[worker] for worker, own in found.items()} == wanted


@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.booleans())
def test_so_does_a_pipeline_that_has_no_network(depth: int, share: int, split: bool, again: bool) -> None:
    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=share)
    workload = dataclasses.replace(workload, layers=workload.layers[:depth])
    costs = CostModel(workload, rates.cluster(depth, workers_per_host=2))
    plan = pipelines(Shape(dp=1, pp=depth, share=share), split_backward=split)
    plan = recomputing(plan, plan.workers) if again else plan
    hops = plan.routes[0].hops
    times = pipeline_times(hops, costs, split_backward=split, recompute=plan.recompute)
    in_flight_limits = np.full((3, depth), 2 * depth)
    schedule = pipeline_schedule(times, share, split_backward=split, in_flight_limits=in_flight_limits, effort=1_000)

    parts = [ScheduledPart(component, schedule) for component in components(plan.routes)]
    state = workload_memory(workload).state_bytes(plan.placement)
    found = peak_bytes_of(plan, parts, costs)
    assert {worker: own - state[worker] for worker, own in found.items()} == moving(plan, parts, costs)


@given(st.integers(1, 5), st.integers(1, 8), st.booleans())
def test_a_stage_of_one_f_one_b_needs_what_its_worker_does(depth: int, share: int, again: bool) -> None:
    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=share)
    workload = dataclasses.replace(workload, layers=workload.layers[: 2 * depth])
    cut_points = tuple(range(2, 2 * depth + 1, 2))
    plan = pipelines_plan([PipelineLayout(cut_points, tuple(range(depth)), share)])
    plan = recomputing(plan, plan.workers if again else ())
    orders = {stage: one_f_one_b(plan.routes[0], stage, depth - stage, share, plan.recompute) for stage in range(depth)}
    memory = program_memory(Program(orders), plan.placement, workload)

    for stage, hop in enumerate(plan.routes[0].hops):
        found = workload_memory(workload).one_f_one_b_bytes(
            hop.layers.start, hop.layers.stop, to_end=depth - stage, micro_batches=share, recompute=again
        )
        assert found == memory[stage].peak_bytes


def drawn_pipeline(rng: random.Random, *, depth: int, micro_batches: int) -> tuple[CostModel, tuple[int, ...]]:
    """Return costs of a few layers with bytes of every kind, and the cut points of a pipeline."""
    layers = rng.randint(depth, depth + 4)
    costs = instance(rng, workers=depth, layers=layers, micro_batches=micro_batches, kinds=1, memory=False)
    return costs, (*sorted(rng.sample(range(1, layers), depth - 1)), layers)


def pipeline_memory(
    costs: CostModel, cut_points: tuple[int, ...], recompute: dict[int, RecomputedLayers], *, split: bool, kept: int
) -> tuple[Program, dict[int, int]]:
    """Return a program with so many micro-batches in flight at most, and the peak of each stage."""
    layout = PipelineLayout(cut_points, tuple(range(len(cut_points))), costs.workload.micro_batches)
    plan = pipelines_plan([layout], split_backward=split, recompute=recompute)
    program = list_schedule(plan, costs, dict.fromkeys(plan.workers, InFlightLimit(kept, kept)))
    memory = program_memory(program, plan.placement, costs.workload)
    return program, {worker: own.peak_bytes for worker, own in memory.items()}


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_an_option_needs_what_its_stage_does_one_micro_batch_at_a_time(
    seed: int, depth: int, share: int, split: bool
) -> None:
    rng = random.Random(seed)
    costs, cut_points = drawn_pipeline(rng, depth=depth, micro_batches=share)
    memory = workload_memory(costs.workload)
    first, options = memory.stage_options(2**40, split_backward=split, micro_batches=10**9)
    ranges = list(pairwise((0, *cut_points)))
    chosen = [rng.randrange(first[start, stop], first[start, stop + 1]) for start, stop in ranges]
    recompute = {
        stage: RecomputedLayers(start, start + full + selective, selective)
        for stage, ((start, _), (full, selective)) in enumerate(
            zip(ranges, options[["full", "selective"]][chosen].tolist(), strict=True)
        )
        if full + selective
    }

    _, peaks = pipeline_memory(costs, cut_points, recompute, split=split, kept=1)

    needed = needed_bytes(options[chosen])
    starts, stops = np.array(ranges).T
    messages = memory.max_message_bytes(starts, stops, share)
    found = np.array([peaks[stage] for stage in range(depth)])
    assert (needed <= found).all()
    assert (found <= needed + messages).all()
    if depth == 1:
        assert found.tolist() == needed.tolist()


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(Recompute),
)
def test_no_program_needs_less_than_its_micro_batches_in_flight(
    seed: int, depth: int, share: int, kept: int, split: bool, level: Recompute
) -> None:
    costs, cut_points = drawn_pipeline(random.Random(seed), depth=depth, micro_batches=share)
    ranges = list(pairwise((0, *cut_points)))
    recompute = {
        stage: RecomputedLayers(start, stop, stop - start if level is Recompute.SELECTIVE else 0)
        for stage, (start, stop) in enumerate(ranges)
        if level is not Recompute.NONE
    }

    program, peaks = pipeline_memory(costs, cut_points, recompute, split=split, kept=kept)

    memory = workload_memory(costs.workload)
    for stage, (start, stop) in enumerate(ranges):
        changes = [{"F": 1, "B": -1, "I": -1, "W": 0}[operation.kind.value] for operation in program.of(stage)]
        in_flight = max(accumulate(changes))
        assert memory.min_stage_bytes(start, stop, in_flight=in_flight, recompute=level) <= peaks[stage]
