"""The predicted seconds of the rest of an interrupted step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chameleon_ft.cost.step import estimate_rest, estimate_step
from chameleon_ft.schedule import list_schedule, replay
from tests.schedule.interruptions import Interruption, sound_rest
from tests.strategies import Shape, equal_costs, pipelines, shapes

_LATENCY_S = 0.25


@given(shapes, st.booleans(), st.floats(0, 1))
def test_the_rest_ends_when_the_survivors_have_reduced_all_gradients(shape: Shape, split: bool, at: float) -> None:
    assume(shape.dp > 1)
    plan = pipelines(shape, split_backward=split)
    costs = equal_costs(
        layers=shape.pp,
        micro_batches=plan.micro_batches,
        workers=len(plan.workers),
        latency_s=_LATENCY_S,
        gradient_bytes=8,
    )
    program = list_schedule(plan, costs)
    step = estimate_step(plan, program, costs)
    interruption = Interruption(plan, replay(program, costs), 0, at * step.program_s)
    rest = interruption.rest(interruption.progress(lambda *_: True))
    left = replace(costs, cluster=replace(costs.cluster, workers=costs.cluster.workers[1:]))
    scheduled = sound_rest(rest, left)
    found = estimate_rest(rest, scheduled, left)

    timed = scheduled.timeline.operations
    assert scheduled.busy_s == pytest.approx(math.fsum(each.end_s - each.start_s for each in timed))
    # Each layer is reduced by its holders at once: a ring of n takes 2 (n - 1) messages.
    ends_s = [scheduled.program_s]
    for layer in range(shape.pp):
        holders = [worker for worker in plan.placement.holders(layer) if worker != 0]
        ready_s = max(
            (each.end_s for each in timed if layer in each.operation.layers and each.operation.kind in "BW"), default=0
        )
        ends_s.append(ready_s + 2 * (len(holders) - 1) * _LATENCY_S)
    assert found.step_s == pytest.approx(max(ends_s))
