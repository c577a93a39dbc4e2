"""Pipelines on workers, the figures they are chosen by, and the plan they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from chameleon_ft.estimate import estimate_parts
from chameleon_ft.plan import Placement, Plan, RecomputedLayers, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, PipelineSchedule, default_limits
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.schedule.limits import limits_of_array
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.search.schedules import PipelineScheduler, TimedPipeline, hops_of
from chameleon_ft.transfer import moved_bytes

__all__ = ["Candidate", "PlacedPipelines", "evaluated", "figures"]

PlacedPipelines: TypeAlias = tuple[tuple[TimedPipeline, tuple[int, ...]], ...]
"""Pipelines, each with its workers."""


@dataclass(frozen=True)
class Candidate:
    """Pipelines on workers; the plan is made only of those that are chosen.

    Attributes:
        name: as in `FoundPlan`.
        pipelines: all of them, with their workers.
        step_s: seconds until all operations have ended and all gradients are reduced.
        costs: of the workload on the cluster.
        current: which layers the live workers hold now.
    """

    name: str
    pipelines: PlacedPipelines
    step_s: float
    costs: CostModel
    current: Placement | None

    @cached_property
    def placement(self) -> Placement:
        """The layers of each worker."""
        held = {hop.worker: (hop.layers,) for timed, own in self.pipelines for hop in hops_of(own, timed.stops)}
        return Placement(len(self.costs.workload.layers), held)

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that workers lack of what they are to hold."""
        return moved_bytes(self.current, self.placement, self.costs.workload.layers)

    @cached_property
    def last_hosts(self) -> int:
        """Hosts whose workers are the only ones to hold some layer."""
        return len(self.placement.indispensable(self.costs.cluster.hosts))

    @property
    def survives_hosts(self) -> bool:
        """Whether every layer has a holder left, whichever host is lost."""
        # More pipelines than a host has workers are never all on one host.
        return len(self.pipelines) > self.costs.cluster.host_sizes[0] or not self.last_hosts

    @property
    def scheduler(self) -> PipelineScheduler:
        """The scheduler that made its schedules."""
        return self.pipelines[0][0].scheduler

    def found_on(self, costs: CostModel) -> FoundPlan:
        """The plan with its predictions for `costs`, whose workers may be faster than those of `self.costs`."""
        found = self.found()
        if costs.cluster == self.costs.cluster:
            return found
        return _predicted(found.name, found.plan, costs, self.current, found.ceiling)[0]

    def found(self) -> FoundPlan:
        """The plan, with all that is predicted of it."""
        routes: list[Route] = []
        ceiling: dict[int, InFlightLimit] = {}
        recompute: dict[int, RecomputedLayers] = {}
        for timed, workers in self.pipelines:
            hops = hops_of(workers, timed.stops)
            limits = self.scheduler.limits(timed.spec)
            assert limits is not None
            ceiling.update(zip(workers, limits_of_array(limits), strict=True))
            recompute.update((worker, own) for worker, own in zip(workers, timed.recomputed, strict=True) if own)
            first = len(routes)
            routes += [Route(number, hops) for number in range(first, first + timed.spec.micro_batches)]
        different = list({id(timed): timed for timed, _ in self.pipelines}.values())
        return FoundPlan(
            name=self.name,
            plan=Plan(self.placement, tuple(routes), self.scheduler.split_backward, FrozenMap(recompute)),
            ceiling=FrozenMap(ceiling),
            step_s=self.step_s,
            program_s=max(timed.program_s for timed in different),
            peak_bytes=max(map(self.scheduler.peak_bytes, different)),
            moved_bytes=self.moved_bytes,
            last_hosts=self.last_hosts,
            schedules=tuple(timed.schedule for timed in different),
        )


def figures(found: Candidate | FoundPlan) -> tuple[float, ...]:
    """The figures that plans are chosen by, the most important one first."""
    return found.step_s, found.moved_bytes, found.last_hosts


def evaluated(
    others: Mapping[str, Plan],
    costs: CostModel,
    current: Placement | None,
    given: Mapping[int, InFlightLimit] | None,
) -> tuple[list[FoundPlan], dict[str, int]]:
    """Plans that were made elsewhere, and for those that do not fit the bytes that are missing.

    A plan may keep as much as there is memory for, and where that does not hold it, what `default_limits` says; or what
    the `given` ceiling says.
    """
    found: list[FoundPlan] = []
    too_large: dict[str, int] = {}
    for name, plan in others.items():
        for ceiling in (None, default_limits(plan)) if given is None else (_of_workers(given, plan.workers),):
            predicted, missing_bytes = _predicted(name, plan, costs, current, ceiling or {})
            if not missing_bytes:
                too_large.pop(name, None)
                found.append(predicted)
                break
            too_large[name] = missing_bytes
    return found, too_large


def _predicted(
    name: str, plan: Plan, costs: CostModel, current: Placement | None, ceiling: Mapping[int, InFlightLimit]
) -> tuple[FoundPlan, int]:
    """The plan with its predictions, and the bytes that some worker lacks for it."""
    parts = best_parts(plan, costs, ceiling=ceiling)
    estimate = estimate_parts(plan, parts, costs)
    found = FoundPlan(
        name=name,
        plan=plan,
        ceiling=FrozenMap(ceiling),
        step_s=estimate.step_s,
        program_s=estimate.program_s,
        peak_bytes=max(estimate.peak_bytes.values()),
        moved_bytes=moved_bytes(current, plan.placement, costs.workload.layers),
        last_hosts=len(plan.placement.indispensable(costs.cluster.hosts)),
        schedules=tuple(part.schedule for part in parts if isinstance(part.schedule, PipelineSchedule)),
    )
    return found, max(estimate.over_capacity(costs).values(), default=0)


def _of_workers(ceiling: Mapping[int, InFlightLimit], workers: Sequence[int]) -> dict[int, InFlightLimit]:
    return {worker: ceiling[worker] for worker in workers if worker in ceiling}
