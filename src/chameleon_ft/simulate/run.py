"""Policies side by side on a trace, and over a range of failure rates, cluster sizes, memories or bandwidths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Final

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.presets import Recompute
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery import POLICIES, Policy, uniform_limits
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.simulate.account import ORACLE, KnownRates, Oracle, live_of
from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout
from chameleon_ft.simulate.by_class.world import World, world_of
from chameleon_ft.simulate.engine import PolicySimulation
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners.class_planner import ClassPlanner
from chameleon_ft.simulate.planners.exact_planner import Decisions, ExactPlanner, RealPlan
from chameleon_ft.simulate.planners.planner import Planner
from chameleon_ft.simulate.results import Results
from chameleon_ft.simulate.traces.trace import Trace
from chameleon_ft.workload import Workload

_RECOMPUTING: Final = {
    Recompute.NONE: "",
    Recompute.SELECTIVE: ", recomputing selectively",
    Recompute.FULL: ", recomputing",
}
# Every stage has its successor's state and computes its forward as well (Bamboo, Thorpe et al., NSDI 2023). Runs do not
# have this policy, and it is always simulated by class.
_REDUNDANT: Final = Policy(kinds={"repartition": "redundant"}, starts="equal")
_POLICIES: Final[Mapping[str, Policy]] = FrozenMap({**POLICIES, "redundant": _REDUNDANT})
SIMULATED_POLICIES: Final = (*_POLICIES, ORACLE)
"""Every policy that can be simulated."""


def simulate(
    trace: Trace,
    workload: Workload,
    cluster: Cluster,
    policies: Sequence[str] = SIMULATED_POLICIES,
    *,
    parameters: Parameters = Parameters(),
    start: Plan | None = None,
    in_flight_limits: Mapping[int, InFlightLimit] | None = None,
    as_in_run: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Results:
    """Return the results of policies on a trace.

    Nothing is drawn: equal arguments give bit-identical results.

    Args:
        trace: events of the workers.
        workload: the computation of a step.
        cluster: the workers 0, 1, ... of the trace, all equal.
        policies: some of `SIMULATED_POLICIES`; the oracle's samples are part of every result.
        parameters: assumptions.
        start: the initial plan of all policies; None for the fastest plan that is found. Policies that never leave
            their initial depth are then simulated from several plans, and the best counts; with few workers, these
            include equal pipelines of each depth.
        in_flight_limits: the most micro-batches that the workers of `start` can keep; None for as many as its longest
            route has stages.
        as_in_run: True if policies act exactly as in a run: under `reroute` and `recycle` workers that are back stay
            idle, and `restart` takes the layout with the most workers and writes checkpoints as often as others, if
            these write any. Without effect above `exact_up_to` workers.
        progress: is called with the name of the policy and the share of the trace that is done.

    Raises:
        ConfigError: a policy does not exist, or the cluster is not that of the trace.
        PlanError: nothing fits the memory of the workers.
        ConservationError: a defect of the simulator.
    """
    _check(trace, cluster, policies)
    real_start = None
    if start is not None:
        if in_flight_limits is None:
            in_flight_limits = uniform_limits(start.workers, max(len(route.hops) for route in start.routes))
        real_start = RealPlan(start, FrozenMap(in_flight_limits))
    simulator = _Simulator(
        trace=trace,
        world=world_of(CostModel(workload, cluster), parameters, start),
        samples_per_step=workload.samples,
        parameters=parameters,
        start=real_start,
        as_in_run=as_in_run,
    )
    simulations = {policy: simulator.simulate(policy, progress) for policy in policies if policy != ORACLE}
    oracle = Oracle(trace, simulator.rates, simulator.fastest_rate)
    failure_free = simulator.rates.best(live_of([1.0] * trace.workers)) * trace.duration_s
    return Results(
        trace=trace.name,
        workers=trace.workers,
        duration_s=trace.duration_s,
        start=_describe_start(simulator.world),
        samples_per_step=workload.samples,
        lost_events=sum(any(event.kind == "lost" for event in events) for _, events in trace.groups()),
        policies={
            policy: oracle.result(failure_free)
            if policy == ORACLE
            else simulations[policy].result(policy, failure_free_samples=failure_free, oracle_samples=oracle.samples)
            for policy in policies
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulator:
    """Simulates one policy after the other on a trace; see `simulate`.

    Attributes:
        rates: the highest that any of the simulations has reached.
        decisions: a cache that the policies share.
    """

    trace: Trace
    world: World
    samples_per_step: int
    parameters: Parameters
    start: RealPlan | None
    as_in_run: bool
    rates: KnownRates = field(default_factory=KnownRates)
    decisions: Decisions = field(default_factory=Decisions)

    def simulate(self, policy: str, progress: Callable[[str, float], None] | None) -> PolicySimulation:
        """Return the simulation with the most steps, if the policy depends on its initial plan."""
        several = self.start is None and _POLICIES[policy].starts == "several"
        starts = len(self.world.several_starts(dict.fromkeys(self.world.workers, 1.0))) if several else 1
        simulations = [self._simulate(policy, number, progress) for number in range(starts)]
        return max(simulations, key=lambda simulation: simulation.account.steps)

    def fastest_rate(self, workers: int) -> float:
        """Return the samples per second of the fastest plan for a number of workers."""
        mix = self.world.mixes.fastest(workers)
        return 0.0 if mix is None else self.samples_per_step / (mix.step_s + self.parameters.step_overhead_s)

    def _simulate(
        self, policy: str, start_number: int, progress: Callable[[str, float], None] | None
    ) -> PolicySimulation:
        # In a run without checkpoints `restart` could not restart, and nothing would be learnt.
        restarts = policy == "restart" and not (self.as_in_run and self.parameters.has_checkpoints)
        simulation = PolicySimulation(
            self.trace,
            self._planner(policy, start_number, restarts=restarts),
            samples_per_step=self.samples_per_step,
            parameters=self.parameters,
            rates=self.rates,
            restarts=restarts,
            adapts_checkpoints=restarts or (self.parameters.has_checkpoints and not self.as_in_run),
        )
        simulation.run(None if progress is None else lambda share: progress(policy, share))
        return simulation

    def _planner(self, policy: str, start_number: int, *, restarts: bool) -> Planner[ClusterLayout] | Planner[RealPlan]:
        if policy in POLICIES and not restarts and len(self.world.workers) <= self.parameters.exact_up_to:
            return ExactPlanner(
                policy, self.world, self.decisions, self.start, start_number=start_number, as_in_run=self.as_in_run
            )
        world = self.world.with_redundancy() if policy == "redundant" else self.world
        return ClassPlanner(_POLICIES[policy], world, start_number=start_number)


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


def _describe_start(world: World) -> str:
    layout = world.start or world.fastest_layout(ClusterLayout(()), dict.fromkeys(world.workers, 1.0))
    if layout is None:
        return "nothing"
    cuts = Counter(pipeline.cut for pipeline in layout.pipelines)
    return ", ".join(
        f"{count} x {cut.depth} stages{_RECOMPUTING[cut.recompute]}"
        for cut, count in sorted(cuts.items(), reverse=True)
    )


SWEPT: Final = ("rate", "workers", "memory", "bandwidth", "micro-batches")
"""Quantities that can be varied: `rate`, which divides every time of the trace; `workers`, the number taken from the
cluster; `memory` of a worker in 10^9 bytes; `bandwidth`, a factor on all links; `micro-batches` of a step."""

MAX_VARIED: Final = 1e9
"""The largest value of each, and the inverse of the least."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The subject of a simulation: the events, the workload and the workers."""

    trace: Trace
    workload: Workload
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a sweep with its results; `misfit` is the reason if nothing can be trained."""

    value: float
    results: Results | None
    misfit: str = ""


@dataclass(frozen=True, slots=True)
class Lead:
    """The policy that trains most in a range of values, both ends included."""

    policy: str
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points of one of the `SWEPT` quantities, by ascending value."""

    name: str
    points: tuple[Point, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The simulated policies, in the requested order."""
        return next((tuple(point.results.policies) for point in self.points if point.results is not None), ())

    def leads(self, policies: Sequence[str]) -> tuple[Lead, ...]:
        """Return the policy that trains most in each range of values; the first among equals."""
        found: list[Lead] = []
        for point in self.points:
            if point.results is not None:
                by_policy = point.results.policies
                best = max(policies, key=lambda policy: by_policy[policy].samples)
                if found and found[-1].policy == best:
                    found[-1] = replace(found[-1], last=point.value)
                else:
                    found.append(Lead(best, point.value, point.value))
        return tuple(found)

    def to_json(self) -> dict[str, object]:
        """Return the results by value, for `--json`."""
        return {
            "sweep": self.name,
            "points": [
                {
                    "value": point.value,
                    **({"misfit": point.misfit} if point.results is None else point.results.to_json()),
                }
                for point in self.points
            ],
        }


def varied(scene: Scene, name: str, value: float) -> Scene:
    """Return the scene with one of the `SWEPT` quantities changed.

    Raises:
        ConfigError: the name or the value cannot be used.
    """
    if name not in SWEPT:
        raise ConfigError(f"{name!r} cannot be varied; take one of {', '.join(SWEPT)}")
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value:g}: take numbers above 0")
    if not 1 / MAX_VARIED <= value <= MAX_VARIED:
        raise ConfigError(f"{name}={value:g}: take numbers from {1 / MAX_VARIED:g} to {MAX_VARIED:g}")
    if name in ("workers", "micro-batches") and value != int(value):
        raise ConfigError(f"{name}={value:g}: take whole numbers")
    trace, cluster = scene.trace, scene.cluster
    match name:
        case "rate":
            return replace(scene, trace=trace.compressed(value))
        case "workers":
            workers, per_host = int(value), trace.workers_per_host
            if workers > trace.workers or workers % per_host:
                raise ConfigError(
                    f"workers={workers}: take multiples of the {per_host} workers of a host, {trace.workers} at most"
                )
            kept = tuple(worker for worker in cluster.workers if worker.id < workers)
            fewer = trace.on_hosts(workers // per_host, workers_per_host=per_host)
            return replace(scene, trace=fewer, cluster=replace(cluster, workers=kept))
        case "memory":
            resized = tuple(replace(worker, memory_bytes=round(value * 10**9)) for worker in cluster.workers)
            return replace(scene, cluster=replace(cluster, workers=resized))
        case "bandwidth":

            def faster(link: Link) -> Link:
                return replace(link, bytes_per_s=link.bytes_per_s * value)

            links = faster(cluster.intra_host), faster(cluster.inter_host)
            return replace(scene, cluster=Cluster(cluster.workers, *links))
    return replace(scene, workload=replace(scene.workload, micro_batches=int(value)))


def sweep(
    scene: Scene,
    name: str,
    values: Sequence[float],
    policies: Sequence[str] = SIMULATED_POLICIES,
    *,
    parameters: Parameters = Parameters(),
    progress: Callable[[float, str, float], None] | None = None,
) -> Sweep:
    """Return the results of each policy on the scene at each value.

    Args:
        scene: the subject to vary.
        name: the quantity; see `SWEPT`.
        values: in any order, each once.
        policies: see `simulate`.
        parameters: assumptions.
        progress: called with the value, the name of the policy and the completed share of the trace.

    Raises:
        ConfigError: a value cannot be used, or as in `simulate`.
    """
    if not values or len(set(values)) < len(values):
        raise ConfigError(f"a sweep over {name} needs values, each of them once")
    points = []
    for value, at in [(value, varied(scene, name, value)) for value in sorted(values)]:
        report = None if progress is None else partial(progress, value)
        try:
            results = simulate(at.trace, at.workload, at.cluster, policies, parameters=parameters, progress=report)
        except PlanError as error:
            points.append(Point(value, None, str(error)))
        else:
            points.append(Point(value, results))
    return Sweep(name, tuple(points))
