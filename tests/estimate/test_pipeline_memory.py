"""The memory of schedules, against that of the programs that are made of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.estimate import program_memory
from chameleon_ft.estimate.memory import schedule_bytes, stages_of
from chameleon_ft.estimate.pipeline_memory import pipeline_bytes
from chameleon_ft.plan import Plan
from chameleon_ft.presets import derive_workload, device, model_shape
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule._components import components
from chameleon_ft.schedule._network import NetworkBuilder
from chameleon_ft.schedule._pipelines import PipelineSchedule, pipeline_schedule
from chameleon_ft.schedule.best import ScheduledPart, best_parts, program_of
from tests.strategies import Planned, Shape, pipelines, planned


def moving(plan: Plan, parts: list[ScheduledPart], costs: CostModel) -> dict[int, int]:
    """What each worker holds at its worst moment, without what it holds all the time."""
    state = stages_of(costs.workload).state_bytes(plan.placement)
    memory = program_memory(program_of(plan, parts), plan.placement, costs.workload)
    return {worker: own.peak_bytes - state[worker] for worker, own in memory.items()}


@given(planned(), st.data())
def test_any_schedule_needs_what_its_program_does(case: Planned, data: st.DataObject) -> None:
    recompute = frozenset(data.draw(st.sets(st.sampled_from(case.plan.workers))))
    plan = dataclasses.replace(case.plan, recompute=recompute)
    parts = best_parts(plan, case.costs, effort=1)

    wanted = moving(plan, parts, case.costs)

    for part in parts:
        assert not isinstance(part.schedule, PipelineSchedule)
        found = schedule_bytes(part.schedule, stages_of(case.costs.workload), recompute=recompute)
        assert dict(zip(part.component.workers, found, strict=True)) == {
            worker: wanted[worker] for worker in part.component.workers
        }


@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.booleans())
def test_so_does_a_pipeline_that_has_no_network(depth: int, share: int, split: bool, again: bool) -> None:
    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-7b"), rates, micro_batch_size=1, micro_batches=share)
    workload = dataclasses.replace(workload, layers=workload.layers[:depth])
    costs = CostModel(workload, rates.cluster(depth, workers_per_host=2))
    plan = pipelines(Shape(dp=1, pp=depth, share=share), split_backward=split)
    plan = dataclasses.replace(plan, recompute=frozenset(plan.workers if again else ()))
    builder = NetworkBuilder(costs, split_backward=split, recompute=plan.recompute)
    ceiling = np.full((2, depth), 2 * depth)
    schedule = pipeline_schedule(plan.routes[0].hops, share, builder, ceiling=ceiling, effort=1_000)

    found = pipeline_bytes(schedule, stages_of(workload), recompute=[again] * depth)

    parts = [ScheduledPart(component, schedule) for component in components(plan.routes)]
    assert dict(zip(plan.workers, found, strict=True)) == moving(plan, parts, costs)
