"""The program of a plan that takes the least time, of those that list scheduling and a bounded local search find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule._network import NetworkBuilder, builder_of
from chameleon_ft.schedule._orders import build_program
from chameleon_ft.schedule._records import Integers
from chameleon_ft.schedule.components import Component, components
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.heuristics import ListSchedules, Problem
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
    "listed_step_s",
    "program_of",
    "step_s_of",
]

# Some milliseconds.
DEFAULT_EFFORT: Final = 100_000

_T = TypeVar("_T")


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

    def scheduled(component: Component, builder: NetworkBuilder) -> Schedule | PipelineSchedule:
        if not component.is_pipeline:
            return best_schedule(Problem.of(builder, component.ways, component.taken, ceiling), effort=effort)
        times, micro_batches = builder.times(component.ways[0]), len(component.taken)
        most = limits_array(component.workers, ceiling or {})
        split = builder.split_backward
        one = found.get(_problem_key(times, split, micro_batches, most))
        if one is not None:
            return one
        return pipeline_schedule(times, micro_batches, split_backward=split, ceiling=most, effort=effort)

    return [ScheduledPart(*each) for each in _for_components(plan, costs, ceiling, scheduled)]


def program_of(plan: Plan, parts: Iterable[ScheduledPart]) -> Program:
    """What each worker of the plan runs."""
    return build_program(plan, ((part.component, part.schedule.orders) for part in parts))


def step_s_of(parts: Iterable[ScheduledPart]) -> float:
    """Seconds until the last operation has ended."""
    return max(part.schedule.step_s for part in parts)


def best_step_s(
    plan: Plan, costs: CostModel, *, ceiling: Mapping[int, InFlightLimit] | None = None, effort: float = DEFAULT_EFFORT
) -> float:
    """`step_s` of `best_program`, without the program."""
    return step_s_of(best_parts(plan, costs, ceiling=ceiling, effort=effort))


def listed_step_s(
    plan: Plan,
    costs: CostModel,
    *,
    ceiling: Mapping[int, InFlightLimit] | None = None,
    effort: float = DEFAULT_EFFORT,
    enough_s: float = 0.0,
) -> float:
    """Seconds of the best list schedules that the effort allows, without a local search and without a program.

    For a component no further ones are tried if the best takes `enough_s` or less.
    """

    def listed_s(component: Component, builder: NetworkBuilder) -> float:
        problem = Problem.of(builder, component.ways, component.taken, ceiling)
        return ListSchedules(problem).search(effort, enough_s=enough_s).step_s

    return max(step_s for _, step_s in _for_components(plan, costs, ceiling, listed_s))


def _for_components(
    plan: Plan,
    costs: CostModel,
    ceiling: Mapping[int, InFlightLimit] | None,
    decide: Callable[[Component, NetworkBuilder], _T],
) -> list[tuple[Component, _T]]:
    """The components of a plan with what `decide` finds for each, called once for those that are alike.

    `decide` gets a builder for the component's workers.
    """
    builder = builder_of(plan, costs)
    decided: dict[tuple[object, ...], _T] = {}
    found: list[tuple[Component, _T]] = []
    for component in components(plan.routes):
        split = plan.splits(component.workers[0])
        own = builder.part(component.workers, split_backward=split)
        limits = limits_array(component.workers, ceiling or {})
        key = split, component.taken, tuple(own.slots(hops).tobytes() for hops in component.ways), limits.tobytes()
        if key not in decided:
            decided[key] = decide(component, own)
        found.append((component, decided[key]))
    return found


def _problem_key(
    times: PipelineTimes, split_backward: bool, micro_batches: int, ceiling: Integers
) -> tuple[object, ...]:
    """All that the schedule of a pipeline follows from, but for the effort."""
    return times, split_backward, micro_batches, ceiling.tobytes()
