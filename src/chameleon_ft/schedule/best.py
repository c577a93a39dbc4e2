"""Programs of plans: list scheduling under heuristics, then a local search for the least time, within an effort.

The local search has two neighbourhoods. If routes differ, micro-batches change their priority, and the list scheduler
does the rest: messages between two workers keep their order, so the order on one worker binds the next, and no change
on a single worker is better. Then operations on the critical path change places.
The critical path consists of blocks, operations that follow each other without idle time on one worker; a neighbour
moves an operation to the front or to the end of its block (as in job-shop scheduling: Dell'Amico and Trubian 1993), or
exchanges two operations of one kind, because under tight limits a forward may be late for want of another one's room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule.list_scheduler import (
    InFlightLimit,
    Rules,
    Schedule,
    default_limits,
    limits_array,
    limits_of_array,
    limits_of_paths,
    replayed,
    schedule,
)
from chameleon_ft.schedule.network import (
    CostModel,
    Network,
    NetworkBuilder,
    PipelineTimes,
    component_builders,
    pipeline_network,
)
from chameleon_ft.schedule.program import Program, records_by_code
from chameleon_ft.schedule.records import PROGRAM_RECORD, Component, HopPath, Integers

# Shares of the effort for heuristics and, where routes share stages, for priorities; the cost of replaying an operation
# if scheduling one costs 1.
_HEURISTICS: Final = 1 / 2
_PRIORITIES: Final = 1 / 4
_REPLAY: Final = 1 / 7

# A search that could try fewer candidates is skipped: on such large networks a list schedule alone is close to the
# lower bound.
_MIN_SCHEDULES: Final = 50
_MIN_REPLAYS: Final = 100

# Places by which the priority of a micro-batch is raised or lowered, besides to the highest and to the lowest.
_STEPS: Final = (2, 4)


class Heuristic(NamedTuple):
    """Fields of `Rules`, with limits relative to the default ones.

    in_flight, kept: shares of its default limits that a worker may have in flight, and keep, beyond them. extra:
    micro-batches more of both.
    """

    forward_first: bool
    patience: float
    in_flight: float = 0.0
    kept: float = 0.0
    extra: int = 0


_Table = tuple[Heuristic, ...]

# In the order in which they are tried. The first is 1F1B or ZB-H1 on a plain pipeline. Each of the others gained most
# over the ones before it, on some hundred plans of presets and generated ones. Limits above ZB-H1's, no patience, and
# twice as much in flight at the first stage make bubbles short (as ZB-H2: Qi et al., Zero Bubble Pipeline Parallelism,
# 2023).
_PLAIN_SPLIT: Final[_Table] = (
    Heuristic(True, 0.75),
    Heuristic(True, 0.25, 0.4, 0.5),
    Heuristic(True, 0.0, 0.6, 0.75),
    Heuristic(True, 0.1, 0.75, 0.75),
    Heuristic(True, 0.4, 0.25, 0.25),
    Heuristic(True, 0.0, 0.5, 0.75),
    Heuristic(False, 0.0, 1.0, 1.0),
)
# For pipelines of at least `_DEEP` stages, where the effort may allow no more than the first few.
_DEEP: Final = 16
_DEEP_SPLIT: Final[_Table] = (
    Heuristic(True, 0.25, 0.5, 0.5),
    Heuristic(True, 0.1, 1.0, 0.5, 8),
    Heuristic(True, 0.5, 0.5, 0.5),
    Heuristic(True, 0.75),
    Heuristic(True, 0.25, 0.6, 0.75),
    Heuristic(True, 0.0, 0.5, 0.75),
    Heuristic(True, 0.25, 0.4, 0.5),
)
_PLAIN_FUSED: Final[_Table] = (
    Heuristic(True, 0.0),
    Heuristic(True, 0.0, 1.0, 1.0),
    Heuristic(True, 0.0, 0.5, 0.5),
    Heuristic(False, 0.0, 0.5, 0.5),
)
_SHARED_SPLIT: Final[_Table] = (
    Heuristic(False, 0.1, 0.5, 0.5, 2),
    Heuristic(True, 0.0, 0.5, 0.5, 4),
    Heuristic(False, 0.0, 1.0, 1.0),
    Heuristic(True, 0.0),
    Heuristic(False, 0.25, 0.0, 0.0, 4),
)
_SHARED_FUSED: Final[_Table] = (
    Heuristic(False, 0.0, 0.5, 0.5, 1),
    Heuristic(True, 0.0, 0.5, 0.5, 4),
    Heuristic(True, 0.0, 1.0, 1.0),
)
# On a plain pipeline these together come close to the best of all.
_MIN_PLAIN: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A network to schedule, with limits; arrays are int64 [3, workers], in flight, kept and deferred, by worker index.

    Attributes:
        network: what to schedule.
        default: `default_limits`.
        in_flight_limits: the largest limits allowed.
        depth: hops of the longest route.
        shared: routes take different paths, so that pipelines share workers.
    """

    network: Network
    default: Integers
    in_flight_limits: Integers
    depth: int
    shared: bool

    @classmethod
    def of(
        cls,
        builder: NetworkBuilder,
        paths: Sequence[HopPath],
        path_of: Sequence[int],
        in_flight_limits: Mapping[int, InFlightLimit] | None,
    ) -> Problem:
        """Return the problem of routes between the builder's workers, of which `path_of` has the path of each.

        Workers that `in_flight_limits` lacks are not bounded.
        """
        return cls(
            network=builder.network(paths, path_of),
            default=limits_array(builder.workers, limits_of_paths(builder.workers, paths)),
            in_flight_limits=limits_array(builder.workers, in_flight_limits or {}),
            depth=max(map(len, paths)),
            shared=len(paths) > 1,
        )

    def rules(self) -> tuple[Rules, ...]:
        """Return the rules to try, in order: the default limits and larger ones, by one pipeline depth at most.

        More in flight than in 1F1B hides latency, and keeps a pipeline busy whose stage is shared with others.
        """
        if self.shared:
            table = _SHARED_SPLIT if self.network.split_backward else _SHARED_FUSED
        elif self.network.split_backward:
            table = _PLAIN_SPLIT if self.depth < _DEEP else _DEEP_SPLIT
        else:
            table = _PLAIN_FUSED
        # Under low limits many heuristics have equal limits.
        different: dict[tuple[bytes, bool, float], Rules] = {}
        for heuristic, own in zip(table, self._limits(table), strict=True):
            rules = Rules(limits=own, forward_first=heuristic.forward_first, patience=heuristic.patience)
            different.setdefault((own.tobytes(), heuristic.forward_first, heuristic.patience), rules)
        return tuple(different.values())

    def largest(self) -> Integers:
        """The largest limits that any heuristic may use."""
        found: Integers = self._limits([Heuristic(True, 0.0, extra=self.depth)])[0]
        return found

    def _limits(self, table: Sequence[Heuristic]) -> Integers:
        """The limits of each heuristic, at most `depth` above the default; int64 [heuristics, 3, workers]."""
        default, in_flight_limits = self.default, self.in_flight_limits
        shares = np.array([[[each.in_flight], [each.kept]] for each in table])
        extra = np.array([[[each.extra]] for each in table])
        more = np.minimum(self.depth, np.ceil(shares * default[:2]).astype(np.int64) + extra)
        kept = default[1] + more.max(axis=1)
        in_flight = np.minimum(default[0] + more[:, 0], kept)
        kept = np.minimum(kept, in_flight_limits[1])
        in_flight = np.minimum(np.minimum(in_flight, in_flight_limits[0]), kept)
        return np.stack([in_flight, kept, np.minimum(kept, in_flight_limits[2])], axis=1)


class ListSchedules:
    """List schedules of a problem under one heuristic after another.

    Rules that denied an operation its send are tried once more with only gradients sent ahead, the best first: when no
    heuristic is left, or, if they made the best schedule, when the effort is spent.

    Attributes:
        schedules: best first: the ones within the limits, then by time, then in the order of trial.
        effort: operations scheduled so far, without runs to a dead end.
        enough_s: a step time that is good enough: the lower bound plus the share `slack`.
    """

    def __init__(self, problem: Problem, *, slack: float = ROUNDING) -> None:
        self._network = problem.network
        # However small the effort is.
        self._least = 1 if problem.shared else _MIN_PLAIN
        self._untried = deque(problem.rules())
        self._strained: list[Schedule] = []
        self.enough_s = problem.network.lower_bound_s() * (1 + slack)
        self.schedules: list[Schedule] = []
        self.effort = 0

    def search(self, effort: float = math.inf) -> Schedule:
        """Try heuristics until the best is good enough, none is left, or the effort is spent."""
        # The best is good enough if it keeps the limits and takes `enough_s`.
        while not (self.schedules and _quality(self.schedules[0]) <= (False, self.enough_s)):
            rules = self._next_rules(effort)
            if rules is None:
                break
            found = schedule(self._network, rules)
            self.effort += len(found.codes)
            self.schedules.append(found)
            self.schedules.sort(key=_quality)
            if found.strained:
                self._strained.append(found)
                self._strained.sort(key=_quality)
        return self.schedules[0]

    def _next_rules(self, effort: float) -> Rules | None:
        is_spent = self.effort >= effort
        if self._untried and (not is_spent or len(self.schedules) < self._least):
            return self._untried.popleft()
        if self._strained and (not is_spent or self._strained[0] is self.schedules[0]):
            return replace(self._strained.pop(0).rules, gradients_only=True)
        return None


def _quality(found: Schedule) -> tuple[bool, float]:
    return found.beyond_limits, found.step_s


def best_schedule(problem: Problem, *, effort: float, slack: float = ROUNDING) -> Schedule:
    """Return the best schedule found.

    Args:
        problem: what to schedule.
        effort: how many operations may be scheduled; replaying one counts a seventh. Some heuristics are always tried.
        slack: relative distance from the lower bound that is good enough.
    """
    listed = ListSchedules(problem, slack=slack)
    found, enough_s = listed.search(effort * _HEURISTICS), listed.enough_s
    if found.beyond_limits or found.step_s <= enough_s:
        return found
    priorities = _PRIORITIES if problem.shared else 0.0
    found = reprioritized(problem.network, found, enough_s=enough_s, effort=effort * priorities)
    replays = effort * (1 - _HEURISTICS - priorities) / _REPLAY
    shorter = reordered(problem.network, found, problem.largest(), enough_s=enough_s, effort=replays)
    return shorter if shorter.step_s < found.step_s * (1 - ROUNDING) else found


def reprioritized(network: Network, found: Schedule, *, enough_s: float, effort: float) -> Schedule:
    """Return a schedule under the rules of `found`, with other priorities of routes, that takes no longer.

    Takes the first improvement until there is none, the time is `enough_s`, or `effort` operations have been scheduled.
    """
    trials = int(effort) // len(network.operations)
    if trials < _MIN_SCHEDULES:
        return found
    best, order = found, tuple(network.by_priority.tolist())
    seen = {order}
    neighbours = _neighbours(order)
    while trials and best.step_s > enough_s and (neighbour := next(neighbours, None)) is not None:
        if neighbour not in seen:
            seen.add(neighbour)
            trials -= 1
            trial = schedule(network, found.rules, np.array(neighbour))
            if trial.step_s < best.step_s and not trial.beyond_limits:
                best, neighbours = trial, _neighbours(neighbour)
    return best


def _neighbours(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Orders of the routes in which one of them has the highest or lowest priority, or some places more or less."""
    last = len(order) - 1
    for place, slot in enumerate(order):
        rest = order[:place] + order[place + 1 :]
        targets = (0, *(place - step for step in reversed(_STEPS)), *(place + step for step in _STEPS), last)
        for target in targets:
            if 0 <= target <= last and target != place:
                yield (*rest[:target], slot, *rest[target:])


def reordered(network: Network, found: Schedule, limits: Integers, *, enough_s: float, effort: float) -> Schedule:
    """Return a schedule within `limits`, int64 [3, workers], that takes no longer than `found`, which keeps them too.

    Tabu search: goes to the best neighbour that has not been visited, even if it takes longer, and returns the best
    schedule of all. Ends at `enough_s`, without such a neighbour, or when `effort` operations have been replayed.
    """
    if len(network.operations) * _MIN_REPLAYS > effort:
        return found
    # Imported here, as everywhere: importing a kernel loads numba, and most users of this module run none.
    from chameleon_ft.schedule._kernels.replay import Neighbourhood, changed, replay_neighbours, run_blocking

    received_in, sent_in = _channels_of_operations(network)
    senders, receivers = (np.ascontiguousarray(network.channels[name]) for name in ("sender", "receiver"))
    workers = np.ascontiguousarray(network.slots["worker"])
    of = Neighbourhood(workers, network.operations, received_in, sent_in, network.first, limits, network.split_backward)
    present = best = found.codes
    best_s = found.step_s
    visited = {present.tobytes()}
    operations = 0
    while best_s > enough_s and operations < effort:
        changes, steps_s, sums_s = replay_neighbours(of, present)
        operations += (1 + len(changes)) * len(present)
        # Of neighbours that take equally long, the one with the lowest sum of the workers' ends comes first.
        for number in np.lexsort((sums_s, steps_s)).tolist():
            neighbour = changed(present, *changes[number].tolist())
            if neighbour.tobytes() in visited:
                continue
            # It must end if channels hold one message, as `check_program` demands.
            ran = run_blocking(network.first, received_in[neighbour], sent_in[neighbour], senders, receivers)
            if (ran[0] == network.first[1:]).all():
                break
        else:
            break
        present = neighbour
        visited.add(present.tobytes())
        if steps_s[number] < best_s:
            best, best_s = present, float(steps_s[number])
    return replayed(network, replace(found.rules, limits=limits), best)


def _channels_of_operations(network: Network) -> tuple[Integers, Integers]:
    """The channels that each operation receives from and sends into, or -1; int64 [operations] by code."""
    slots, count = network.slots, len(network.slots)
    received_in, sent_in = np.full(len(network.operations), -1), np.full(len(network.operations), -1)
    # Slots whose activation goes to another worker, from which its gradient comes back.
    sender = np.flatnonzero(~slots["last"][:-1] & (slots["worker"][:-1] != slots["worker"][1:]))
    sent_in[sender] = received_in[sender + 1] = slots["down"][sender]
    sent_in[count + sender + 1] = received_in[count + sender] = slots["up"][sender + 1]
    return received_in, sent_in


# Some milliseconds.
DEFAULT_EFFORT: Final = 100_000


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
    forward_first: bool = True,
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
        forward_first: a forward goes first when a backward is ready too and the limits allow both. That keeps as many
            micro-batches in flight as they allow, as 1F1B and ZB-H1 do, and is better under tight limits. Backward
            first frees memory as early as possible, and is often better under loose ones.

    Raises:
        PlanError: `limits` misses a worker of the plan, or the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    limits = default_limits(plan) if limits is None else limits
    if missing := [worker for worker in plan.workers if worker not in limits]:
        raise PlanError(f"the limits say nothing about worker {missing[0]}; give one for every worker of the plan")
    parts: list[ScheduledPart] = []
    for component, builder in component_builders(plan, costs):
        rules = Rules(limits=limits_array(builder.workers, limits), forward_first=forward_first)
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

    The list schedules put forwards or backwards first, under the default limits and some larger ones. Components,
    workers that no route joins, are scheduled independently, and equal ones once. A plain pipeline gets the schedule of
    `pipeline_schedule`.

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
        in_flight_limits: by stage, how many micro-batches it may have in flight, keep and defer; int64 [3, stages].
        effort: effort of `best_program`. With 0 it is the best of a few list schedules, seldom a hundredth longer than
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
