"""Courses: all that is needed to carry out a proposal, and drafts of them that fit the memory of their workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.estimate import PartsEstimate, estimate_parts, peak_bytes_of
from chameleon_ft.plan import Plan, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, PipelineSchedule, Program, default_limits
from chameleon_ft.schedule.best import ScheduledPart, best_parts, program_of
from chameleon_ft.transfer import Transfer
from chameleon_ft.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All that is needed to carry out the chosen candidate.

    Attributes:
        plan: the plan.
        in_flight_limits: the most that its workers can keep.
        program: the operations of each worker in a step, by `best_program` with those limits or by the search.
        transfer: moves layers before; None if all is read from a checkpoint.
    """

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    program: Program
    transfer: Transfer | None


@dataclass(frozen=True, slots=True)
class CourseDraft:
    """A course without its program: most candidates are not chosen, and assembling a program takes time."""

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    parts: Sequence[ScheduledPart]
    estimate: PartsEstimate
    transfer: Transfer | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        in_flight_limits: Mapping[int, InFlightLimit],
        costs: CostModel,
        schedules: Sequence[PipelineSchedule] = (),
    ) -> Self:
        """Draft a course under these limits; pipelines of `schedules` need not be scheduled again."""
        parts = best_parts(plan, costs, in_flight_limits=in_flight_limits, reuse=schedules)
        return cls(plan, in_flight_limits, parts, estimate_parts(plan, parts, costs))

    @classmethod
    def lean(cls, plan: Plan, costs: CostModel) -> Self:
        """Draft a course with as few micro-batches in flight as 1F1B has.

        If that does not fit, the workers that lack memory recompute as many layers as they need to. So the memory of an
        infeasible plan is the least it needs.
        """
        limits = default_limits(plan)
        few = {worker: InFlightLimit(limit.in_flight, limit.in_flight) for worker, limit in limits.items()}
        draft = cls.of(plan, few, costs)
        while (recompute := _more_recomputed(draft, costs)) is not None:
            draft = cls.of(replace(plan, recompute=recompute), few, costs)
        return draft

    def course(self) -> Course:
        """Assemble the program of the course."""
        return Course(
            plan=self.plan,
            in_flight_limits=FrozenMap(self.in_flight_limits),
            program=program_of(self.plan, self.parts),
            transfer=self.transfer,
        )


def _more_recomputed(draft: CourseDraft, costs: CostModel) -> dict[int, RecomputedLayers] | None:
    """Return recomputation under which the workers that lack memory have enough, or recompute all their layers.

    Of each worker the fewest layers, selectively before in full, lowest first: backward goes downwards, so when it
    reaches them the activations of the layers above are freed. The present order of operations is assumed. None if
    nothing can change: no worker lacks memory, or all that do recompute everything already.
    """
    parts, cluster = draft.parts, costs.cluster
    recompute = dict(draft.plan.recompute)
    options = {worker: _wider(draft.plan, worker, costs.workload) for worker in draft.estimate.over_capacity(costs)}
    while options := {worker: ranges for worker, ranges in options.items() if ranges}:
        for worker, ranges in options.items():
            recompute[worker] = ranges.popleft()
        parts = [part for part in parts if not options.keys().isdisjoint(part.component.workers)]
        peak_bytes = peak_bytes_of(replace(draft.plan, recompute=recompute), parts, costs)
        options = {
            worker: left for worker, left in options.items() if peak_bytes[worker] > cluster.capacity_bytes(worker)
        }
    return recompute if recompute != draft.plan.recompute else None


def _wider(plan: Plan, worker: int, workload: Workload) -> deque[RecomputedLayers]:
    """Return wider and wider recomputation on a worker: from its lowest layer on, each of one held layer more."""
    own, span = plan.recompute.get(worker), plan.placement.span(worker)
    stops = [layer + 1 for layer in plan.placement.layers_of(worker)]
    if any(workload.layers[layer].selective_bytes is not None for layer in span):
        ranges = [RecomputedLayers(span.start, stop, stop - span.start) for stop in stops]
        ranges += [RecomputedLayers(span.start, span.stop, span.stop - stop) for stop in stops]
    else:
        ranges = [RecomputedLayers(span.start, stop) for stop in stops]
    return deque(
        layers
        for layers in ranges
        if own is None or (layers != own and layers.covers(own) and layers.full.stop >= own.full.stop)
    )
