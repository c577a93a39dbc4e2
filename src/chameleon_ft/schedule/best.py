"""The program of a plan that takes the least time, of those that list scheduling and a bounded local search find."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._network import NetworkBuilder, builder_of
from chameleon_ft.schedule._orders import build_program
from chameleon_ft.schedule._records import Integers
from chameleon_ft.schedule.components import Component, components
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.heuristics import Problem
from chameleon_ft.schedule.limits import InFlightLimit, limits_array, limits_of_array
from chameleon_ft.schedule.list_scheduler import Schedule
from chameleon_ft.schedule.local_search import best_schedule
from chameleon_ft.schedule.pipeline_times import PipelineTimes
from chameleon_ft.schedule.pipelines import PipelineSchedule, pipeline_schedule
from chameleon_ft.schedule.program import Program

__all__ = [
    "DEFAULT_EFFORT",
    "ScheduledPart",
    "ScheduledProgram",
    "best_parts",
    "best_program",
    "best_step_s",
    "program_of",
    "step_s_of",
]

# Some milliseconds.
DEFAULT_EFFORT: Final = 100_000


@dataclass(frozen=True, slots=True)
class ScheduledProgram:
    """A program with its predicted time and how it was made.

    Attributes:
        program: what each worker runs.
        step_s: seconds of its replay.
        limits: what each worker was allowed to keep.
    """

    program: Program
    step_s: float
    limits: Mapping[int, InFlightLimit]


@dataclass(frozen=True, slots=True)
class ScheduledPart:
    """A component of a plan with the schedule that was chosen for it.

    Components that are alike share one schedule, which knows workers only by their index in `component.workers`.
    """

    component: Component
    schedule: Schedule | PipelineSchedule


def best_program(
    plan: Plan,
    costs: CostModel,
    *,
    ceiling: Mapping[int, InFlightLimit] | None = None,
    effort: float = DEFAULT_EFFORT,
) -> ScheduledProgram:
    """The fastest of up to a dozen list schedules: both preferences, the default limits and some larger ones. In
    plans of up to a few hundred operations, a local search makes it shorter.

    Components, workers that no route joins, are scheduled independently, and those that are alike once. A plain
    pipeline gets the schedule of `pipeline_schedule` with the same effort, whatever runs beside it.

    On a plain pipeline with free messages that is 1F1B at once: what meets the lower bound is left as it is. Where
    stages are shared or messages take time, larger limits are usually faster: they cost memory, at most one pipeline
    depth of micro-batches more on a worker than `default_limits(plan)`. `ceiling` bounds that; workers it leaves out
    are not bounded. As in `list_schedule`, a limit is exceeded only where otherwise no worker could run anything.

    Args:
        plan: what to run.
        costs: how long operations and messages take.
        ceiling: what each worker can keep at most.
        effort: operations that may be scheduled for each component; a replayed one counts a seventh. Not a time, so
            that the result is deterministic. The first list schedules are always made: one, and for a plain pipeline
            the first few.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    parts = best_parts(plan, costs, ceiling=ceiling, effort=effort)
    limits = dict.fromkeys(plan.workers, InFlightLimit(1, 1))
    for part in parts:
        limits.update(zip(part.component.workers, limits_of_array(part.schedule.limits), strict=True))
    return ScheduledProgram(program=program_of(plan, parts), step_s=step_s_of(parts), limits=FrozenMap(limits))


def best_parts(
    plan: Plan,
    costs: CostModel,
    *,
    ceiling: Mapping[int, InFlightLimit] | None = None,
    effort: float = DEFAULT_EFFORT,
    known: Iterable[PipelineSchedule] = (),
) -> list[ScheduledPart]:
    """The schedules that `best_program` makes its program of; making the program takes longer than finding them.

    Pipelines with the times, micro-batches and ceiling of one that is `known` get its schedule.
    """
    found = {_problem_key(one.times, one.split_backward, one.micro_batches, one.ceiling): one for one in known}
    builder = builder_of(plan, costs)

    def scheduled(component: Component, own: NetworkBuilder, most: Integers) -> Schedule | PipelineSchedule:
        if not component.is_pipeline:
            return best_schedule(Problem.of(own, component.ways, component.taken, ceiling), effort=effort)
        times, micro_batches, split = own.times(component.ways[0]), len(component.taken), own.split_backward
        if (one := found.get(_problem_key(times, split, micro_batches, most))) is not None:
            return one
        return pipeline_schedule(times, micro_batches, split_backward=split, ceiling=most, effort=effort)

    # Components that are alike are scheduled once.
    schedules: dict[tuple[object, ...], Schedule | PipelineSchedule] = {}
    parts: list[ScheduledPart] = []
    for component in components(plan.routes):
        split = plan.splits(component.workers[0])
        own = builder.part(component.workers, split_backward=split)
        most = limits_array(component.workers, ceiling or {})
        key = split, component.taken, tuple(own.slots(hops).tobytes() for hops in component.ways), most.tobytes()
        if key not in schedules:
            schedules[key] = scheduled(component, own, most)
        parts.append(ScheduledPart(component, schedules[key]))
    return parts


def program_of(plan: Plan, parts: Iterable[ScheduledPart]) -> Program:
    """The program that runs these schedules of a plan's components."""
    return build_program(plan, ((part.component, part.schedule.orders) for part in parts))


def step_s_of(parts: Iterable[ScheduledPart]) -> float:
    """Seconds until the last operation has ended."""
    return max(part.schedule.step_s for part in parts)


def best_step_s(
    plan: Plan, costs: CostModel, *, ceiling: Mapping[int, InFlightLimit] | None = None, effort: float = DEFAULT_EFFORT
) -> float:
    """`step_s` of `best_program`, without the program."""
    return step_s_of(best_parts(plan, costs, ceiling=ceiling, effort=effort))


def _problem_key(
    times: PipelineTimes, split_backward: bool, micro_batches: int, ceiling: Integers
) -> tuple[object, ...]:
    """All that the schedule of a pipeline follows from, but for the effort."""
    return times, split_backward, micro_batches, ceiling.tobytes()
