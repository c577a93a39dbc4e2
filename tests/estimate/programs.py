"""Programs that tests replay."""

from __future__ import annotations

from chameleon_ft.plan import Plan
from chameleon_ft.schedule import Operation, OperationKind, Program


def one_f_one_b(plan: Plan) -> Program:
    """1F1B with fused backward on a plan of pipelines that share no workers, by its textbook order."""
    operations: dict[int, list[Operation]] = {worker: [] for worker in plan.workers}
    for hops in dict.fromkeys(route.hops for route in plan.routes):
        routes = [route for route in plan.routes if route.hops == hops]
        for stage, hop in enumerate(hops):
            warm_up = min(len(hops) - stage - 1, len(routes))
            order = [(OperationKind.FORWARD, route) for route in routes[:warm_up]]
            for index, route in enumerate(routes):
                if warm_up + index < len(routes):
                    order.append((OperationKind.FORWARD, routes[warm_up + index]))
                order.append((OperationKind.BACKWARD, route))
            operations[hop.worker] += [Operation.of(kind, route, stage) for kind, route in order]
    return Program({worker: tuple(own) for worker, own in operations.items()})
