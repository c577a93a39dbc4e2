"""Programs from plans, by one event-driven list scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._engine import Rules
from chameleon_ft.schedule._network import builder_of
from chameleon_ft.schedule._orders import build_program, schedule
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit, default_limits
from chameleon_ft.schedule.program import Program

__all__ = ["Preference", "list_schedule"]


class Preference(StrEnum):
    """What a worker runs first when a forward and a backward are both ready and its limits allow both.

    Forward first keeps as many micro-batches in flight as the limits allow, which is what 1F1B and ZB-H1 do, and is the
    better choice where limits are tight. Backward first frees memory as early as it can, and is often better where they
    are not.
    """

    FORWARD = "forward"
    BACKWARD = "backward"


def list_schedule(
    plan: Plan,
    costs: CostModel,
    limits: Mapping[int, InFlightLimit] | None = None,
    *,
    prefer: Preference = Preference.FORWARD,
) -> Program:
    """A program that runs `plan`, made by letting every worker take what it can run as soon as it is free.

    On a pipeline of equal stages under `default_limits` the program is 1F1B, and with split backward ZB-H1. On any plan
    it is deterministic and passes `check_program`. Among ready operations of a kind a worker takes the micro-batch that
    is earliest in its own pipeline; a W is run when nothing else is ready or about to be, or to make room for an F.

    A limit is exceeded, by as little as goes on from there, only where otherwise no worker could run anything: limits
    that are too tight for a worker on several stages of one route.

    Args:
        plan: what to run.
        costs: how long operations and messages take.
        limits: how much each worker may keep; `default_limits(plan)` when None.
        prefer: what goes first when a forward and a backward are both ready.

    Raises:
        PlanError: `limits` misses a worker of the plan, or the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    limits = default_limits(plan) if limits is None else limits
    if missing := [worker for worker in plan.workers if worker not in limits]:
        raise PlanError(f"the limits say nothing about worker {missing[0]}; give one for every worker of the plan")
    network = builder_of(plan, costs).network_of(route.hops for route in plan.routes)
    rules = Rules(
        in_flight=tuple(limits[worker].in_flight for worker in plan.workers),
        kept=tuple(limits[worker].kept for worker in plan.workers),
        forward_first=prefer is Preference.FORWARD,
    )
    return build_program(plan, schedule(network, rules).orders)
