"""Pipelines on workers, the figures for choosing among them, and their plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from chameleon_ft.estimate import estimate_parts
from chameleon_ft.plan import Placement, Plan, RecomputedLayers, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, PipelineSchedule, default_limits
from chameleon_ft.schedule.best import DEFAULT_EFFORT as PROGRAM_EFFORT
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.schedule.list_scheduler import limits_of_array
from chameleon_ft.search.pipelines.schedules import hops_of
from chameleon_ft.search.placement.gradient_sync import PlacedPipelines
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.transfer import moved_bytes


@dataclass(frozen=True)
class Candidate:
    """Pipelines on workers; a plan is made only if they are chosen.

    Attributes:
        name: as in `FoundPlan`.
        pipelines: all pipelines, with their workers.
        step_s: seconds until all operations have ended and all gradients are reduced.
        costs: of the workload on the cluster.
        current: layers that the live workers hold now.
    """

    name: str
    pipelines: PlacedPipelines
    step_s: float
    costs: CostModel
    current: Placement | None

    @cached_property
    def placement(self) -> Placement:
        """The layers of each worker."""
        held = {hop.worker: (hop.layers,) for timed, own in self.pipelines for hop in hops_of(own, timed.cut_points)}
        return Placement(len(self.costs.workload.layers), held)

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes of their layers that workers lack."""
        return moved_bytes(self.current, self.placement, self.costs.workload.layers)

    @cached_property
    def host_single_points_of_failure(self) -> int:
        """Hosts whose workers are the only ones to hold some layer."""
        return len(self.placement.single_points_of_failure(self.costs.cluster.hosts))

    @property
    def survives_hosts(self) -> bool:
        """Whether every layer keeps a holder after the loss of any one host."""
        # More pipelines than a host has workers are never all on one host.
        return len(self.pipelines) > self.costs.cluster.host_sizes[0] or not self.host_single_points_of_failure

    def found_on(self, costs: CostModel) -> FoundPlan:
        """Return the plan with its predictions for `costs`, whose workers may be faster than those of `self.costs`."""
        found = self.found()
        if costs.cluster == self.costs.cluster:
            return found
        return predicted(found.name, found.plan, costs, self.current, found.in_flight_limits)[0]

    def found(self) -> FoundPlan:
        """Return the plan with its predictions."""
        routes: list[Route] = []
        in_flight_limits: dict[int, InFlightLimit] = {}
        recompute: dict[int, RecomputedLayers] = {}
        fused: set[int] = set()
        for timed, workers in self.pipelines:
            in_flight_limits.update(zip(workers, limits_of_array(timed.schedule.in_flight_limits), strict=True))
            recompute.update((worker, own) for worker, own in zip(workers, timed.recomputed, strict=True) if own)
            hops, first = hops_of(workers, timed.cut_points), len(routes)
            routes += [Route(number, hops) for number in range(first, first + timed.spec.micro_batches)]
            if not timed.scheduler.split_backward:
                fused.update(workers)
        different = list(dict.fromkeys(timed for timed, _ in self.pipelines))
        split = any(timed.scheduler.split_backward for timed in different)
        fused_workers = frozenset(fused) if split else frozenset()
        return FoundPlan(
            name=self.name,
            plan=Plan(self.placement, tuple(routes), split, FrozenMap(recompute), fused_workers),
            in_flight_limits=FrozenMap(in_flight_limits),
            step_s=self.step_s,
            program_s=max(timed.program_s for timed in different),
            peak_bytes=max(timed.scheduler.peak_bytes(timed) for timed in different),
            moved_bytes=self.moved_bytes,
            host_single_points_of_failure=self.host_single_points_of_failure,
            schedules=tuple(timed.schedule for timed in different),
        )


def figures(found: Candidate | FoundPlan) -> tuple[float, ...]:
    """Return the figures for choosing plans, the most important first."""
    return found.step_s, found.moved_bytes, found.host_single_points_of_failure


def evaluated(
    others: Mapping[str, Plan],
    costs: CostModel,
    current: Placement | None,
    given: Mapping[int, InFlightLimit] | None,
) -> tuple[list[FoundPlan], dict[str, int]]:
    """Return plans made elsewhere, and the missing bytes of plans that do not fit.

    The `given` limits apply; by default memory alone limits a plan, or `default_limits` where memory does not suffice.
    """
    found: list[FoundPlan] = []
    too_large: dict[str, int] = {}
    for name, plan in others.items():
        given_here = None if given is None else {own: given[own] for own in plan.workers if own in given}
        for in_flight_limits in ({}, default_limits(plan)) if given_here is None else (given_here,):
            other, missing = predicted(name, plan, costs, current, in_flight_limits)
            if not missing:
                too_large.pop(name, None)
                found.append(other)
                break
            too_large[name] = max(missing.values())
    return found, too_large


def predicted(
    name: str,
    plan: Plan,
    costs: CostModel,
    current: Placement | None,
    in_flight_limits: Mapping[int, InFlightLimit],
    *,
    effort: float = PROGRAM_EFFORT,
) -> tuple[FoundPlan, Mapping[int, int]]:
    """Return the plan with its predictions, and the bytes that workers lack for it, by worker."""
    parts = best_parts(plan, costs, in_flight_limits=in_flight_limits, effort=effort)
    estimate = estimate_parts(plan, parts, costs)
    found = FoundPlan(
        name=name,
        plan=plan,
        in_flight_limits=FrozenMap(in_flight_limits),
        step_s=estimate.step_s,
        program_s=estimate.program_s,
        peak_bytes=max(estimate.peak_bytes.values()),
        moved_bytes=moved_bytes(current, plan.placement, costs.workload.layers),
        host_single_points_of_failure=len(plan.placement.single_points_of_failure(costs.cluster.hosts)),
        schedules=tuple(part.schedule for part in parts if isinstance(part.schedule, PipelineSchedule)),
    )
    return found, estimate.over_capacity(costs)
