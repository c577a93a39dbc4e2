"""Memory of pipelines under 1F1B, from orders written out by the definition of 1F1B."""

from __future__ import annotations

from collections.abc import Mapping

from chameleon_ft.cost.memory import program_memory
from chameleon_ft.plan import PipelineLayout, RecomputedLayers, Route, pipelines_plan
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program
from tests.strategies import recomputing


def one_f_one_b(
    route: Route, hop: int, in_flight: int, micro_batches: int, recompute: Mapping[int, RecomputedLayers] | None = None
) -> tuple[Operation, ...]:
    """The order of a worker: `in_flight` forwards, then backward and forward in turn, then the backwards left."""
    routes = [Route(number, route.hops) for number in range(micro_batches)]
    order: list[Operation] = []
    ahead = min(in_flight, micro_batches)
    for number in range(ahead):
        order.append(Operation.of(OperationKind.FORWARD, routes[number], hop, recompute or {}))
    for number in range(micro_batches):
        order.append(Operation.of(OperationKind.BACKWARD, routes[number], hop, recompute or {}))
        if ahead + number < micro_batches:
            order.append(Operation.of(OperationKind.FORWARD, routes[ahead + number], hop, recompute or {}))
    return tuple(order)


def peak_bytes(costs: CostModel, cut_points: tuple[int, ...], micro_batches: int, *, recompute: bool = False) -> int:
    """Peak bytes of the worker that needs most."""
    depth = len(cut_points)
    pipeline = PipelineLayout(cut_points, tuple(range(depth)), micro_batches)
    plan = pipelines_plan([pipeline])
    plan = recomputing(plan, plan.workers if recompute else ())
    orders = {
        stage: one_f_one_b(plan.routes[0], stage, depth - stage, micro_batches, plan.recompute)
        for stage in range(depth)
    }
    memory = program_memory(Program(orders), plan.placement, costs.workload)
    return max(own.peak_bytes for own in memory.values())


def fits(costs: CostModel, cut_points: tuple[int, ...], micro_batches: int, *, recompute: bool = False) -> bool:
    """Whether every worker has room for its stage; the workers are alike."""
    capacity = costs.cluster.workers[0].memory_bytes
    return capacity is None or peak_bytes(costs, cut_points, micro_batches, recompute=recompute) <= capacity
