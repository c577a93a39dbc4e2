"""Programs of plans: by list scheduling alone, or also by a bounded local search for the least time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Final

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule.components import Component
from chameleon_ft.schedule.costs import CostModel, PipelineTimes
from chameleon_ft.schedule.heuristics import Problem, best_schedule
from chameleon_ft.schedule.list_scheduler import (
    InFlightLimit,
    Rules,
    Schedule,
    default_limits,
    limits_array,
    limits_of_array,
    replayed,
    schedule,
)
from chameleon_ft.schedule.network import component_builders, pipeline_network
from chameleon_ft.schedule.program import Program, records_by_code
from chameleon_ft.schedule.records import PROGRAM_RECORD, Integers

# Some milliseconds.
DEFAULT_EFFORT: Final = 100_000


class Preference(StrEnum):
    """The operation that a worker runs first when a forward and a backward are both ready and its limits allow both.

    Forward first keeps as many micro-batches in flight as the limits allow, as 1F1B and ZB-H1 do, and is better under
    tight limits. Backward first frees memory as early as it can, and is often better under loose ones.
    """

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSchedule(Schedule):
    """The schedule of one pipeline, whose workers are its stages: micro-batch m has the slot m * stages + s at stage s.

    Attributes:
        times, split_backward, micro_batches, in_flight_limits: what is scheduled, as for `pipeline_schedule`.
    """

    times: PipelineTimes
    split_backward: bool
    micro_batches: int
    in_flight_limits: Integers

    def replayed(self, times: PipelineTimes) -> PipelineSchedule:
        """Return these orders under other times of as many stages, such as those of other links."""
        network = pipeline_network(times, self.micro_batches, split_backward=self.split_backward)
        again = replayed(network, self.rules, self.codes)
        return replace(self, times=times, ends_s=again.ends_s, step_s=again.step_s)


@dataclass(frozen=True, slots=True)
class ScheduledProgram:
    """A program with the seconds of its replay, and what each worker was allowed to keep."""

    program: Program
    step_s: float
    limits: Mapping[int, InFlightLimit]


@dataclass(frozen=True, slots=True)
class ScheduledPart:
    """A component of a plan with its schedule, which refers to workers by their index in `component.workers`.

    Equal components share one schedule.
    """

    component: Component
    schedule: Schedule


def list_schedule(
    plan: Plan,
    costs: CostModel,
    limits: Mapping[int, InFlightLimit] | None = None,
    *,
    prefer: Preference = Preference.FORWARD,
) -> Program:
    """Return a program that runs `plan`, in which every worker starts what it can run as soon as it is free.

    On a pipeline of equal stages under `default_limits` it is 1F1B, and with split backward ZB-H1. On any plan it is
    deterministic and passes `check_program`. Among ready operations of a kind a worker takes the micro-batch that is
    earliest in its own pipeline; a W runs when nothing else is ready or about to be, or to make room for an F.

    A limit is exceeded, by as little as possible, only if otherwise no worker could run anything: limits that are too
    tight for a worker on several stages of one route.

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
    parts: list[ScheduledPart] = []
    for component, builder in component_builders(plan, costs):
        rules = Rules(limits=limits_array(builder.workers, limits), forward_first=prefer is Preference.FORWARD)
        parts.append(ScheduledPart(component, schedule(builder.network(component.paths, component.path_of), rules)))
    return program_of(plan, parts)


def best_program(
    plan: Plan,
    costs: CostModel,
    *,
    in_flight_limits: Mapping[int, InFlightLimit] | None = None,
    effort: float = DEFAULT_EFFORT,
) -> ScheduledProgram:
    """Return the fastest of up to a dozen list schedules, made shorter by a local search in plans of up to a few
    hundred operations.

    The list schedules use both preferences, the default limits and some larger ones. Components, workers that no route
    joins, are scheduled independently, and equal ones once. A plain pipeline gets the schedule of `pipeline_schedule`.

    A schedule that meets the lower bound ends the search, as 1F1B does on a plain pipeline with free messages. Larger
    limits are usually faster where stages are shared or messages take time. They cost memory: at most one pipeline
    depth of micro-batches more on a worker than `default_limits(plan)`.

    Args:
        plan: what to run.
        costs: how long operations and messages take.
        in_flight_limits: what each worker can keep at most; workers that it lacks are not bounded. As in
            `list_schedule`, a limit is exceeded only if otherwise no worker could run anything.
        effort: operations that may be scheduled for each component; a replayed one counts a seventh. Not a time, so
            that the result is deterministic. One list schedule, or the first few of a plain pipeline, is always made.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    parts = best_parts(plan, costs, in_flight_limits=in_flight_limits, effort=effort)
    limits = dict.fromkeys(plan.workers, InFlightLimit(1, 1))
    for part in parts:
        limits.update(zip(part.component.workers, limits_of_array(part.schedule.limits), strict=True))
    return ScheduledProgram(program=program_of(plan, parts), step_s=step_s_of(parts), limits=FrozenMap(limits))


def best_parts(
    plan: Plan,
    costs: CostModel,
    *,
    in_flight_limits: Mapping[int, InFlightLimit] | None = None,
    effort: float = DEFAULT_EFFORT,
    reuse: Iterable[PipelineSchedule] = (),
) -> list[ScheduledPart]:
    """Return the schedules of which `best_program` makes its program; making the program takes longer than these.

    Pipelines with the times, micro-batches and limits of a schedule to `reuse` get that one.
    """
    of_pipelines = {
        (one.times, one.split_backward, one.micro_batches, one.in_flight_limits.tobytes()): one for one in reuse
    }
    # Equal components are scheduled once.
    schedules: dict[tuple[object, ...], Schedule] = {}
    parts: list[ScheduledPart] = []
    for component, builder in component_builders(plan, costs):
        paths, path_of, split = component.paths, component.path_of, builder.split_backward
        most = limits_array(component.workers, in_flight_limits or {})
        key = split, path_of, tuple(builder.slots(hops).tobytes() for hops in paths), most.tobytes()
        if key not in schedules and component.is_pipeline:
            times = builder.times(paths[0])
            schedules[key] = of_pipelines.get((times, split, len(path_of), most.tobytes())) or pipeline_schedule(
                times, len(path_of), split_backward=split, in_flight_limits=most, effort=effort
            )
        elif key not in schedules:
            schedules[key] = best_schedule(Problem.of(builder, paths, path_of, in_flight_limits), effort=effort)
        parts.append(ScheduledPart(component, schedules[key]))
    return parts


def program_of(plan: Plan, parts: Iterable[ScheduledPart]) -> Program:
    """Return the program that runs these schedules of a plan's components."""
    records = dict.fromkeys(plan.workers, np.empty(0, PROGRAM_RECORD))
    for part in parts:
        by_code = records_by_code(plan, part.component.routes)
        records.update(zip(part.component.workers, map(by_code.__getitem__, part.schedule.orders), strict=True))
    return Program.of_records(records)


def step_s_of(parts: Iterable[ScheduledPart]) -> float:
    """Return the seconds until the last operation has ended."""
    return max(part.schedule.step_s for part in parts)


def pipeline_schedule(
    times: PipelineTimes,
    micro_batches: int,
    *,
    split_backward: bool,
    in_flight_limits: Integers,
    effort: float,
    slack: float = ROUNDING,
) -> PipelineSchedule:
    """Return the schedule that `best_program` uses for a pipeline with a worker for each stage.

    Args:
        times: of each stage.
        micro_batches: their number.
        split_backward: whether backward is split.
        in_flight_limits: by stage, how many micro-batches it may have in flight, keep and defer; int64 [3, stages].
        effort: as for `best_program`. With 0 it is the best of a few list schedules, seldom a hundredth longer than
            the result of a large effort.
        slack: relative distance from the lower bound that is good enough.
    """
    depth = times.depth
    problem = Problem(
        network=pipeline_network(times, micro_batches, split_backward=split_backward),
        default=np.stack([np.arange(depth, 0, -1), *np.full((2, depth), depth)]),
        in_flight_limits=np.ascontiguousarray(in_flight_limits, np.int64),
        depth=depth,
        shared=False,
    )
    found = best_schedule(problem, effort=effort, slack=slack)
    return PipelineSchedule(
        **{field.name: getattr(found, field.name) for field in fields(found)},
        times=times,
        split_backward=split_backward,
        micro_batches=micro_batches,
        in_flight_limits=in_flight_limits,
    )
