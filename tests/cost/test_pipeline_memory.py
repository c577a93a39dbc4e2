"""The memory of schedules, against that of the programs that are made of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.memory import program_memory, workload_memory
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.step import peak_bytes_of
from chameleon_ft.lab.planned_layouts import one_f_one_b_bytes
from chameleon_ft.plan import PipelineLayout, Plan, pipelines_plan
from chameleon_ft.schedule import CostModel, Program, pipeline_schedule
from chameleon_ft.schedule.best import ScheduledPart, best_parts, program_of
from chameleon_ft.schedule.network import pipeline_times
from chameleon_ft.schedule.records import components
from tests.lab.one_f_one_b import one_f_one_b
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
    plan = pipelines_plan([PipelineLayout(cut_points, tuple(range(depth)), share)], recompute=again)
    orders = {stage: one_f_one_b(plan.routes[0], stage, depth - stage, share, plan.recompute) for stage in range(depth)}
    memory = program_memory(Program(orders), plan.placement, workload)

    for stage, hop in enumerate(plan.routes[0].hops):
        found = one_f_one_b_bytes(
            workload,
            hop.layers,
            to_end=depth - stage,
            micro_batches=share,
            recompute=again,
        )
        assert found == memory[stage].peak_bytes
