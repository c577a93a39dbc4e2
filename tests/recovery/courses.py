"""Checks of the course of a decision."""

from __future__ import annotations

import pytest

from chameleon_ft.cost.step import estimate_step
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.recovery import STAY, Decision, DecisionContext
from chameleon_ft.schedule import check_program
from tests.recovery.contexts import arrived


def check_course(decision: Decision, now: DecisionContext) -> None:
    """Check that the chosen plan can be carried out and has the predicted figures."""
    chosen, course = decision.chosen, decision.course
    assert chosen is not None
    assert course is not None
    assert set(course.plan.workers) <= set(now.live)
    assert set(course.in_flight_limits) <= set(now.live)
    assert course.plan.micro_batches == now.plan.micro_batches
    check_program(course.program, course.plan)
    estimate = estimate_step(course.plan, course.program, now.costs)
    assert estimate.step_s == pytest.approx(chosen.step_s, rel=1e-12)
    if chosen.policy != STAY:  # what is running fits, whatever is estimated
        assert estimate.over_capacity(now.costs) == {}
    assert max(memory.peak_bytes for memory in estimate.memory.values()) == chosen.peak_bytes
    wanted = {
        worker: [number for own in held for number in own] for worker, held in course.plan.placement.ranges.items()
    }
    layers = now.costs.workload.layers
    if course.transfer is None:
        assert chosen.stall_s == now.restart_cost_s
        assert chosen.moved_bytes == sum(state_bytes(layers[number]) for held in wanted.values() for number in held)
        return
    assert course.transfer.total_bytes == chosen.moved_bytes
    assert course.transfer.placement == course.plan.placement
    held = arrived(now.placement, course.transfer.messages)
    for worker, numbers in wanted.items():
        assert set(numbers) <= set(held[worker])
        assert len(set(held[worker])) == len(held[worker]), "a layer has arrived that was there"
