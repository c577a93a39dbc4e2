"""The plans that policies propose, and what is compared of them."""

from __future__ import annotations

from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.plan import Plan
from chameleon_ft.recovery import POLICIES, DecisionContext


def plan_of(now: DecisionContext, policy: str, horizon_s: float = 1e6) -> Plan:
    (only,) = POLICIES[policy](now, horizon_s)
    assert only.plan is not None, only.reason
    return only.plan


def shares_of(plan: Plan) -> dict[tuple[int, ...], int]:
    """Return the micro-batches of each route, by its workers."""
    found: dict[tuple[int, ...], int] = {}
    for route in plan.routes:
        workers = tuple(hop.worker for hop in route.hops)
        found[workers] = found.get(workers, 0) + 1
    return found


def moved_bytes(now: DecisionContext, plan: Plan) -> int:
    layers = now.costs.workload.layers
    return sum(
        state_bytes(layers[number])
        for worker, held in plan.placement.ranges.items()
        for own in held
        for number in own
        if worker not in now.placement.holders(number)
    )
