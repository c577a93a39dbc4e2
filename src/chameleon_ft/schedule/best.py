"""The program of a plan that takes the least time, of those that list scheduling and a bounded search find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.plan import Hop, Plan
from chameleon_ft.schedule._components import Component, components
from chameleon_ft.schedule._engine import Schedule
from chameleon_ft.schedule._orders import records_by_code
from chameleon_ft.schedule._part import Part
from chameleon_ft.schedule._pipelines import PipelinePart, PipelineSchedule
from chameleon_ft.schedule._records import PROGRAM_RECORD, Integers
from chameleon_ft.schedule._trials import Trials, trials_of
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit
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
    """Workers that are joined by routes, with the schedule that was chosen for them.

    That of a pipeline may be one for other workers in its place.
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
    plans of up to a few hundred operations it is what a search makes of that.

    Workers that no route joins are scheduled apart, those that are joined alike only once, and effort goes where the
    step is longest: so the plan takes as long as the slowest of its parts would alone, and the others no longer.

    On a plain pipeline with free messages that is 1F1B at once: what meets the lower bound is left as it is. Where
    stages are shared or messages take time, larger limits are usually faster: they cost memory, at most one pipeline
    depth of micro-batches more on a worker than `default_limits(plan)`. `ceiling` bounds that; workers it leaves out
    are not bounded. As in `list_schedule`, a limit is exceeded only where otherwise no worker could go on.

    Args:
        plan: what to run.
        costs: how long operations and messages take.
        ceiling: what each worker can keep at most.
        effort: operations that may be scheduled for each part that is looked at; a replayed one counts a seventh. Not
            time, so that the answer does not depend on the machine. The first list schedule is always made.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    every = components(plan.routes)
    found = _parts(every, trials_of(plan, costs, ceiling), lambda part: part.finish(effort))
    parts = [ScheduledPart(component, part.best[1]) for component, part in zip(every, found, strict=True)]
    limits = dict.fromkeys(plan.workers, InFlightLimit(1, 1))
    for component, part in zip(every, found, strict=True):
        rules, _ = part.best
        limits.update(zip(component.workers, map(InFlightLimit, rules.in_flight, rules.kept), strict=True))
    return ScheduledProgram(program=program_of(plan, parts), step_s=step_s_of(parts), limits=FrozenMap(limits))


def best_parts(
    plan: Plan,
    costs: CostModel,
    *,
    ceiling: Mapping[int, InFlightLimit] | None = None,
    effort: float = DEFAULT_EFFORT,
    known: Iterable[PipelineSchedule] = (),
) -> list[ScheduledPart]:
    """The schedules that `best_program` makes its program of, which takes longer than to find them.

    Pipelines that take as long as one of those that are `known`, operation by operation, and have the same ceiling,
    have its schedule.
    """
    every, trials = components(plan.routes), trials_of(plan, costs, ceiling)
    settled = _settled(every, trials, known)
    rest = [number for number in range(len(every)) if number not in settled]
    enough_s = max((schedule.step_s for schedule in settled.values()), default=0.0)
    parts = _parts([every[number] for number in rest], trials, lambda part: part.finish(effort), enough_s=enough_s)
    settled |= {number: part.best[1] for number, part in zip(rest, parts, strict=True)}
    return [ScheduledPart(component, settled[number]) for number, component in enumerate(every)]


def program_of(plan: Plan, parts: Iterable[ScheduledPart]) -> Program:
    """What each worker of the plan runs."""
    records = dict.fromkeys(plan.workers, np.empty(0, PROGRAM_RECORD))
    for part in parts:
        component = part.component
        by_code = records_by_code(component.routes, split_backward=plan.split_backward, recompute=plan.recompute)
        records.update(zip(component.workers, map(by_code.__getitem__, part.schedule.orders), strict=True))
    return Program.of_records(records)


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
    """Seconds of the best list schedules that the effort allows, without a search and without a program.

    No further ones are tried when that is `enough_s` or less.
    """
    every, trials = components(plan.routes), trials_of(plan, costs, ceiling)
    parts = _parts(every, trials, lambda part: part.try_rules(effort, enough_s=enough_s))
    return max(part.best[1].step_s for part in parts)


def _parts(
    every: Sequence[Component], trials: Trials, finish: Callable[[Part], None], *, enough_s: float = 0.0
) -> list[Part]:
    """For each component its schedules; those that are alike share them.

    Those that take no longer than `enough_s` are left as they are.
    """
    known: dict[tuple[object, ...], Part] = {}
    found: list[Part] = []
    for component in every:
        own = trials.part(component.workers)
        key = component.taken, own.key(component.ways)
        if key not in known:
            known[key] = _part_of(component, own)
        found.append(known[key])
    while known and not (slowest := max(known.values(), key=_urgency)).finished:
        _, schedule = slowest.best
        if schedule.step_s <= enough_s and not schedule.beyond_limits:
            break
        finish(slowest)
    return found


def _settled(
    every: Iterable[Component], trials: Trials, known: Iterable[PipelineSchedule]
) -> dict[int, Schedule | PipelineSchedule]:
    """By number of the component, the schedules of pipelines that are known."""
    schedules = {
        _problem(each.builder.seconds(each.hops), each.hops, each.micro_batches, each.ceiling): each for each in known
    }
    found: dict[int, Schedule | PipelineSchedule] = {}
    for number, component in enumerate(every) if schedules else ():
        if _is_pipeline(component):
            (hops,) = component.ways
            ceiling = trials.ceiling_of([hop.worker for hop in hops])
            one = schedules.get(_problem(trials.seconds(hops), hops, len(component.taken), ceiling))
            if one is not None:
                found[number] = one
    return found


def _problem(
    seconds: Iterable[Sequence[float]], hops: Iterable[Hop], micro_batches: int, ceiling: Integers
) -> tuple[object, ...]:
    """All that the schedule of a pipeline follows from: workers of equal speed may have memory for less than others."""
    ends = [(hop.layers.start, hop.layers.stop) for hop in hops]
    return micro_batches, ceiling.tobytes(), *ends, *map(tuple, seconds)


def _is_pipeline(component: Component) -> bool:
    return len(component.ways) == 1 and len(component.ways[0]) == len(component.workers)


def _part_of(component: Component, trials: Trials) -> Part:
    if _is_pipeline(component):
        return PipelinePart(trials, component.ways[0], len(component.taken))
    return Part(trials, component.ways, component.taken)


def _urgency(part: Part) -> tuple[bool, float, bool]:
    """Whoever exceeds a limit comes first, then who takes longest; of equals, one with which nothing more is to do."""
    found = part.best[1]
    return found.beyond_limits and not part.finished, found.step_s, part.finished
