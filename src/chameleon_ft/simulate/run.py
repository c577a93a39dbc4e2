"""Policies side by side on a trace: one call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.presets import Recompute
from chameleon_ft.recovery import POLICIES, Policy
from chameleon_ft.recovery.policies import current_name
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.simulate.accounting.oracle import KnownRates, live_of
from chameleon_ft.simulate.accounting.results import PolicyResult, Results, Throughput
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout
from chameleon_ft.simulate.by_class.world import World, world_of
from chameleon_ft.simulate.engine import Course, course_of
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners import redundant
from chameleon_ft.simulate.planners.by_class import ClassPlanner
from chameleon_ft.simulate.planners.exact import Decisions, ExactPlanner, RealPlan
from chameleon_ft.simulate.planners.options import Planner
from chameleon_ft.simulate.traces.trace import Trace
from chameleon_ft.workload import Workload

__all__ = ["ORACLE", "SIMULATED_POLICIES", "simulate"]

ORACLE: Final = "oracle"
_RECOMPUTING: Final = {
    Recompute.NONE: "",
    Recompute.SELECTIVE: ", recomputing selectively",
    Recompute.FULL: ", recomputing",
}
_POLICIES: Final[Mapping[str, Policy]] = FrozenMap({**POLICIES, "redundant": redundant.POLICY})
SIMULATED_POLICIES: Final = (*_POLICIES, ORACLE)
"""Every policy that can be simulated."""


def simulate(
    trace: Trace,
    workload: Workload,
    cluster: Cluster,
    policies: Sequence[str] = SIMULATED_POLICIES,
    *,
    parameters: Parameters = Parameters(),  # noqa: B008 - frozen
    start: Plan | None = None,
    in_flight_limits: Mapping[int, InFlightLimit] | None = None,
    as_in_run: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Results:
    """What each policy makes of a trace.

    Nothing is drawn: the same arguments give the same results, to the bit.

    Args:
        trace: what happens to the workers.
        workload: what a step has to compute.
        cluster: the workers 0, 1, ... of the trace, all alike.
        policies: which of `SIMULATED_POLICIES`; the oracle's samples are part of every result.
        parameters: what is assumed.
        start: what all begin with; None for the fastest plan that is found. Policies that never leave the depth they
            begin with are then simulated from several plans, and the best counts; with few workers, these are equal
            pipelines of each depth as well.
        in_flight_limits: the most that the workers of `start` can keep; None for as many micro-batches as its longest
            route has stages.
        as_in_run: whether policies do just what they do in a run: under `reroute` and `recycle` those who are back stay
            idle, and `restart` takes the layout with the most workers and writes checkpoints as often as others, if
            these write any. Up to `exact_up_to` workers; above it is as without.
        progress: is called with the name of the policy and the share of the trace that it has lived through.

    Raises:
        ConfigError: a policy that there is not, or a cluster that is not that of the trace.
        PlanError: nothing fits the memory of the workers.
        ConservationError: a defect of the simulator.
    """
    policies = [current_name(policy) for policy in policies]
    _check(trace, cluster, policies)
    world = world_of(CostModel(workload, cluster), parameters, start)
    known = KnownRates()
    decisions = Decisions()
    real_start = None
    if start is not None:
        real_start = (
            RealPlan.of_layout(start) if in_flight_limits is None else RealPlan(start, FrozenMap(in_flight_limits))
        )
    courses: dict[str, Course] = {}
    for policy in policies:
        if policy != ORACLE:
            planners = _planners(policy, world, decisions, real_start, as_in_run=as_in_run)
            restarts = policy == "restart" and not _restarts_as_in_run(parameters, as_in_run=as_in_run)
            adapts = restarts or (parameters.has_checkpoints and not as_in_run)
            courses[policy] = _best_course(
                policy, planners, trace, world, known, progress, restarts=restarts, adapts_checkpoints=adapts
            )
    oracle = _Oracle(trace, world, known)
    failure_free = known.best(live_of([1.0] * trace.workers)) * trace.duration_s
    results = {
        policy: oracle.result(failure_free)
        if policy == ORACLE
        else _result(policy, courses[policy], trace, workload.samples, failure_free, oracle.samples)
        for policy in policies
    }
    return Results(
        trace=trace.name,
        workers=trace.workers,
        duration_s=trace.duration_s,
        start=_in_words(world),
        samples_per_step=workload.samples,
        lost_events=sum(any(event.kind == "lost" for event in events) for _, events in trace.groups()),
        policies=results,
    )


def _check(trace: Trace, cluster: Cluster, policies: Sequence[str]) -> None:
    for policy in policies:
        if policy not in SIMULATED_POLICIES:
            near = get_close_matches(policy, SIMULATED_POLICIES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SIMULATED_POLICIES)}"
            raise ConfigError(f"there is no policy {policy!r} to simulate; {hint}")
    if sorted(worker.id for worker in cluster.workers) != list(range(trace.workers)):
        raise ConfigError(f"the trace is of the workers 0 to {trace.workers - 1}; give a cluster of just these")
    if len({(worker.speed, worker.memory_bytes) for worker in cluster.workers}) > 1:
        raise ConfigError("the workers of a simulated cluster must be alike; let the trace make some of them slow")


def _planners(
    policy: str, model: World, decisions: Decisions, start: RealPlan | None, *, as_in_run: bool
) -> list[Planner]:
    """The policy, once from each of several plans where it depends on the plan that it begins with."""
    exact = policy in POLICIES
    if policy == "restart":
        exact = _restarts_as_in_run(model.parameters, as_in_run=as_in_run)
    if policy == "redundant":
        model = model.with_redundancy()
    speeds = dict.fromkeys(model.workers, 1.0)
    several = start is None and _POLICIES[policy].starts == "several"
    numbers = range(len(model.several_starts(speeds)) if several else 1)
    if exact and len(model.workers) <= model.parameters.exact_up_to:
        return [
            ExactPlanner(policy, model, decisions, start, start_number=number, as_in_run=as_in_run)
            for number in numbers
        ]
    return [ClassPlanner(_POLICIES[policy], model, start_number=number) for number in numbers]


def _restarts_as_in_run(parameters: Parameters, *, as_in_run: bool) -> bool:
    """Whether `restart` does. In a run without checkpoints it could not, and would say nothing."""
    return as_in_run and parameters.has_checkpoints


def _in_words(world: World) -> str:
    layout = world.start or world.fastest_layout(ClusterLayout(()), dict.fromkeys(world.workers, 1.0))
    if layout is None:
        return "nothing"
    cuts = Counter(pipeline.cut for pipeline in layout.pipelines)
    return ", ".join(
        f"{count} x {cut.depth} stages" + _RECOMPUTING[cut.recompute]
        for cut, count in sorted(cuts.items(), reverse=True)
    )


def _best_course(
    policy: str,
    planners: Sequence[Planner],
    trace: Trace,
    world: World,
    known: KnownRates,
    progress: Callable[[str, float], None] | None,
    *,
    restarts: bool,
    adapts_checkpoints: bool,
) -> Course:
    """The better one, of policies that never leave the depth they begin with."""
    courses = [
        course_of(
            trace,
            planner,
            samples_per_step=world.costs.workload.samples,
            parameters=world.parameters,
            known=known,
            restarts=restarts,
            adapts_checkpoints=adapts_checkpoints,
            progress=None if progress is None else lambda share: progress(policy, share),
        )
        for planner in planners
    ]
    return max(courses, key=lambda course: course.account.steps)


def _result(
    policy: str, course: Course, trace: Trace, samples_per_step: int, failure_free: float, oracle: float
) -> PolicyResult:
    account = course.account
    return PolicyResult(
        policy=policy,
        workers=trace.workers,
        duration_s=trace.duration_s,
        samples=account.steps * samples_per_step,
        failure_free_samples=failure_free,
        oracle_samples=oracle,
        useful_s=account.useful_s,
        checkpoint_s=account.checkpoint_s,
        unfinished_s=account.part_s,
        stall_by_cause=account.stall_by_cause,
        lost_by_cause=account.lost_by_cause,
        down_s=account.down_s,
        used_hours=course.used_hours,
        idle_hours=course.idle_hours,
        dead_hours=course.dead_hours,
        decisions=course.decisions,
        timeline=course.timeline,
    )


class _Oracle:
    """The highest rates that are known for the live workers, without any stall."""

    def __init__(self, trace: Trace, world: World, known: KnownRates) -> None:
        self._trace = trace
        speeds = dict.fromkeys(range(trace.workers), 1.0)
        since_s = 0.0
        intervals: list[tuple[float, float, int, tuple[tuple[float, int], ...]]] = []
        for time_s, events in trace.groups():
            intervals.append((since_s, time_s - since_s, len(speeds), live_of(speeds.values())))
            for event in events:
                for worker in event.workers:
                    if event.kind == "lost":
                        del speeds[worker]
                    else:
                        speeds[worker] = event.speed
            since_s = time_s
        intervals.append((since_s, trace.duration_s - since_s, len(speeds), live_of(speeds.values())))
        for live in {live for *_, live in intervals}:
            fast = dict(live).get(1.0, 0)
            mix = world.mixes.fastest(fast) if fast else None
            if mix is not None:
                step_s = mix.step_s + world.parameters.step_overhead_s
                known.note(live, world.costs.workload.samples / step_s)
        self._intervals = [(since_s, seconds, count, known.best(live)) for since_s, seconds, count, live in intervals]
        self.samples = math.fsum(seconds * rate for _, seconds, _, rate in self._intervals)

    def result(self, failure_free: float) -> PolicyResult:
        live_s = math.fsum(count * seconds for _, seconds, count, rate in self._intervals if rate)
        idle_s = math.fsum(count * seconds for _, seconds, count, rate in self._intervals if not rate)
        down_s = math.fsum(seconds for _, seconds, _, rate in self._intervals if not rate)
        duration_s, workers = self._trace.duration_s, self._trace.workers
        return PolicyResult(
            policy=ORACLE,
            workers=workers,
            duration_s=duration_s,
            samples=self.samples,
            failure_free_samples=failure_free,
            oracle_samples=self.samples,
            useful_s=duration_s - down_s,
            checkpoint_s=0.0,
            unfinished_s=0.0,
            stall_by_cause={},
            lost_by_cause={},
            down_s=down_s,
            used_hours=live_s / 3600,
            idle_hours=idle_s / 3600,
            dead_hours=workers * duration_s / 3600 - (live_s + idle_s) / 3600,
            decisions=(),
            timeline=tuple(Throughput(since_s, rate) for since_s, seconds, _, rate in self._intervals if seconds),
        )
