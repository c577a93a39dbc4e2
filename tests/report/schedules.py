"""Schedules for pictures and traces."""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_ft.cost.step import estimate_step
from chameleon_ft.plan import Plan
from chameleon_ft.recovery import reroute
from chameleon_ft.report.picture import Lane
from chameleon_ft.schedule import CostModel, TimedOperation, Timeline, best_program
from tests.strategies import Shape, equal_costs, pipelines


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan, its pipelines before any loss, and its predicted timeline."""

    plan: Plan
    pipelines: tuple[tuple[int, ...], ...]
    lane: Lane


def predicted(plan: Plan, costs: CostModel) -> Lane:
    return Lane.predicted(estimate_step(plan, best_program(plan, costs).program, costs))


def scheduled(
    shape: Shape, *, lost: tuple[int, ...] = (), split_backward: bool = False, latency_s: float = 0.25
) -> Scheduled:
    """Return equal pipelines without the lost workers; a forward takes 1 s and a backward 2 s."""
    costs = equal_costs(
        layers=shape.pp,
        micro_batches=shape.dp * shape.share,
        workers=shape.dp * shape.pp,
        latency_s=latency_s,
        gradient_bytes=1,
    )
    plan = reroute(pipelines(shape, split_backward=split_backward), lost, costs)
    whole = tuple(tuple(range(d * shape.pp, (d + 1) * shape.pp)) for d in range(shape.dp))
    return Scheduled(plan, whole, predicted(plan, costs))


def slowed(lane: Lane, *, by: float) -> Lane:
    """Return a measured timeline in which everything takes `by` times as long."""
    timeline = Timeline(
        tuple(
            TimedOperation(timed.worker, timed.operation, timed.start_s * by, timed.end_s * by)
            for timed in lane.timeline.operations
        )
    )
    return Lane("measured", timeline)
