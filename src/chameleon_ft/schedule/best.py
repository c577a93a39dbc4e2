"""The program of a plan that takes the least time, of those that list scheduling and a bounded search find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._orders import build_program
from chameleon_ft.schedule._trials import Trials
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit
from chameleon_ft.schedule.list_scheduler import Preference
from chameleon_ft.schedule.program import Program
from chameleon_ft.schedule.timeline import replay

__all__ = ["ScheduledProgram", "best_program"]


@dataclass(frozen=True, slots=True)
class ScheduledProgram:
    """A program with its predicted time and how it was made.

    Attributes:
        program: what each worker runs.
        step_s: seconds of its replay.
        limits: what each worker was allowed to keep.
        prefer: what went first when a forward and a backward were both ready, in the list schedule it is made from.
    """

    program: Program
    step_s: float
    limits: Mapping[int, InFlightLimit]
    prefer: Preference


def best_program(
    plan: Plan, costs: CostModel, *, ceiling: Mapping[int, InFlightLimit] | None = None
) -> ScheduledProgram:
    """The fastest of a handful of list schedules: both preferences, the default limits and 1, 2 and a depth more. In
    plans of up to a few hundred operations it is what a search makes of that in some tens of milliseconds.

    On a plain pipeline with free messages that is 1F1B at once: what meets the lower bound is left as it is. Where
    stages are shared or messages take time, larger limits are usually faster: they cost memory, at most one pipeline
    depth of micro-batches more on a worker than `default_limits(plan)`. `ceiling` bounds that; workers it leaves out
    are not bounded. As in `list_schedule`, a limit is exceeded only where otherwise no worker could go on.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    rules, found = Trials(plan, costs, ceiling).best([route.hops for route in plan.routes])
    program = build_program(plan, found.orders)
    limits = {
        worker: InFlightLimit(in_flight, kept)
        for worker, in_flight, kept in zip(plan.workers, rules.in_flight, rules.kept, strict=True)
    }
    return ScheduledProgram(
        program=program,
        step_s=replay(program, costs).step_s,
        limits=FrozenMap(limits),
        prefer=Preference.FORWARD if rules.forward_first else Preference.BACKWARD,
    )
