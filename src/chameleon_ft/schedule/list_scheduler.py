"""Programs from plans, by one event-driven list scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Plan

from chameleon_ft.schedule._engine import Rules
from chameleon_ft.schedule._network import NetworkBuilder
from chameleon_ft.schedule._program import build_program, ranks, run
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit, default_limits
from chameleon_ft.schedule.program import Program

__all__ = ["Preference", "list_schedule"]


class Preference(StrEnum):
    """What a worker runs first when a forward and a backward are both ready and its limit allows both."""

    FORWARD = "forward"
    BACKWARD = "backward"


def list_schedule(
    plan: Plan,
    costs: CostModel,
    limits: Mapping[int, InFlightLimit] | None = None,
    *,
    prefer: Preference = Preference.FORWARD,
) -> Program:
    network = NetworkBuilder(plan, costs).network(route.hops for route in plan.routes)
    limits = default_limits(plan) if limits is None else limits
    rules = Rules(
        in_flight=[limits[w].in_flight for w in plan.workers],
        kept=[limits[w].kept for w in plan.workers],
        forward_first=prefer is Preference.FORWARD,
    )
    return build_program(plan, run(network, rules, ranks(network)).orders)
