"""Plans that lead to others, as a decision or a search would give them to the state machine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

from chameleon_ft.plan import LayerRange, Placement, Plan, data_pipeline_plan
from chameleon_ft.recovery.generation import GenerationSpec, LaterPlan
from chameleon_ft.recovery.transition import PlannedTransition
from chameleon_ft.schedule import CostModel, Program, list_schedule
from chameleon_ft.transfer import Message as Transferred
from chameleon_ft.transfer import Transfer
from tests.strategies import equal_costs

LAYERS = 4


def a_plan(workers: Collection[int], *, first_step: int, moves_to: int | None = None) -> GenerationSpec:
    """One pipeline of a stage over the first worker, and as many more as there are workers; it may move a layer."""
    plan = data_pipeline_plan(
        layer_costs=[1.0] * LAYERS, dp=len(workers), pp=1, micro_batches=len(workers), workers=sorted(workers)
    )
    transition = None
    if moves_to is not None:
        source = min(worker for worker in plan.workers if worker != moves_to)
        message = Transferred(source, moves_to, LayerRange(0, 1), 64)
        transfer = Transfer(placement=plan.placement, roles={}, rounds=((message,),))
        transition = PlannedTransition(
            transfer=transfer, participants=tuple(sorted({*plan.workers, moves_to})), keep={}
        )
    return spec_of(plan, first_step=first_step, policy="a policy", action="an action", transition=transition)


def spec_of(plan: Plan, **fields: Any) -> GenerationSpec:
    """A generation of a plan, on equal workers."""
    described = {"first_step": 0, "policy": "start", "action": "start", **fields}
    return GenerationSpec(plan=plan, program=_program(plan), costs=_costs(plan), **described)


@cache
def _program(plan: Plan) -> Program:
    return list_schedule(plan, _costs(plan))


def growing(spec: GenerationSpec, step: int, *, at: int | None) -> GenerationSpec:
    """Return the generation whose batch is twice as large from step `at` on; it begins in a step, maybe later."""
    if at is None or step >= at:
        return spec
    return replace(spec, later=_doubled(spec.plan, at))


@cache
def _doubled(plan: Plan, at: int) -> tuple[LaterPlan, ...]:
    count = plan.micro_batches
    return spec_of(plan).along([(0, count), (at, 2 * count)]).later


def _costs(plan: Plan) -> CostModel:
    layers, workers = plan.placement.num_layers, max(plan.workers) + 1
    return equal_costs(layers=layers, micro_batches=plan.micro_batches, workers=workers)


def in_waves(
    final: GenerationSpec, now: GenerationSpec, waves: int, *, to: int | None = None
) -> tuple[GenerationSpec, ...]:
    """The plans that lead to `final`, with the routes of `now`: layers move to new workers, the same share each time.

    If there are none, they move to worker `to`.

    Plans under which they move take turns with plans of the same workers under which none moves.
    """
    source = min(worker for worker in now.plan.workers if worker != to)
    new = [worker for worker in final.plan.workers if worker not in now.plan.workers]
    plans: list[GenerationSpec] = []
    for wave in range(waves):
        stop = LAYERS * (wave + 1) // waves
        ranges = {**now.plan.placement.ranges, **{worker: (LayerRange(0, stop),) for worker in new}}
        plan = replace(now.plan, placement=Placement(LAYERS, ranges))
        arriving = LayerRange(LAYERS * wave // waves, stop)
        receivers = new or ([] if to is None else [to])
        rounds = tuple((Transferred(source, worker, arriving, 64),) for worker in receivers)
        transfer = Transfer(placement=plan.placement, roles={}, rounds=rounds)
        reached = replace(final, plan=plan, policy="migration")
        plans += [replace(reached, migration=transfer), reached]
    return (*plans[:-1], final)
