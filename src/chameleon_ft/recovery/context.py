"""The input of a decision, and courses: all that is needed to carry out a proposal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.cost.step import PartsEstimate, estimate_parts, peak_bytes_of
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Placement, Plan, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.checkpoints import Checkpoints, Snapshots
from chameleon_ft.schedule import CostModel, InFlightLimit, PipelineSchedule, Program, default_limits
from chameleon_ft.schedule.best import ScheduledPart, best_parts, program_of
from chameleon_ft.search import DEFAULT_EFFORT
from chameleon_ft.transfer import Transfer
from chameleon_ft.workload import Workload


@dataclass(frozen=True, kw_only=True)
class DecisionContext:
    """The known facts when workers are lost, join or become slower.

    Attributes:
        plan: the active plan, lost workers included.
        in_flight_limits: the most micro-batches that its workers can keep; other workers are not limited.
        costs: costs of a step; its cluster has all live workers, including spare and new ones.
        phases: the expected stall without transfers.
        repeat_s: repeated work of the interrupted step, in seconds; see `TransitionEstimate`.
        restart_cost_s: seconds of a return to a checkpoint, without the steps since that checkpoint.
        has_checkpoints: True if there is a checkpoint if a layer loses its last holder; if not, the run ends then.
        step_factor: measured seconds of a step over those that its operations explain; applies to all predicted steps.
        transfer_factor: measured seconds of transfers over those that messages and links explain; likewise.
        measured_migration_factor: The same ratio for migrations; None if none has been measured.
        effort: effort of `find_plan`; with 0, `search.reroute` does not search either.
        holdings: the layers that live workers hold, if these are more than their part of the plan: an interrupted
            transfer leaves layers that need not be sent again.
        checkpoints: how often checkpoints are written, if at all.
        snapshots: to which all go back, instead of a checkpoint, if a layer loses its last holder; None if there are
            none.
        migrates: True if layers move while training continues, under the first plan that needs none of them.
        salvages: True if a step that a loss interrupts is completed, so that a loss costs the time in which peers do
            the work of the lost worker.
        leaving: workers that are to leave: no plan may need them, but until then they hold and send their layers. They
            are not in the cluster of `costs`, and count as lost.
        home: the plan whose empty places idle workers may take; None if they stay idle.
        home_in_flight_limits: the most micro-batches that workers can keep under it.

    Raises:
        ConfigError: seconds that are negative or not finite, or factors that are not positive.
    """

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    costs: CostModel
    phases: StallModel
    repeat_s: float
    restart_cost_s: float
    has_checkpoints: bool = True
    step_factor: float = 1.0
    transfer_factor: float = 1.0
    measured_migration_factor: float | None = None
    effort: int | None = DEFAULT_EFFORT
    holdings: Placement | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    snapshots: Snapshots | None = None
    migrates: bool = False
    salvages: bool = False
    leaving: tuple[Worker, ...] = ()
    home: Plan | None = None
    home_in_flight_limits: Mapping[int, InFlightLimit] = field(default_factory=lambda: FrozenMap({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))
        object.__setattr__(self, "home_in_flight_limits", FrozenMap(self.home_in_flight_limits))
        for name in ("repeat_s", "restart_cost_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be zero or a positive number of seconds; got {value}")
        for name in ("step_factor", "transfer_factor", "migration_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number; got {value}")

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The live workers, ascending."""
        return tuple(sorted(worker.id for worker in self.costs.cluster.workers))

    @cached_property
    def lost(self) -> tuple[int, ...]:
        """The lost workers of the plan, ascending."""
        live = set(self.live)
        return tuple(worker for worker in self.plan.workers if worker not in live)

    @cached_property
    def placement(self) -> Placement:
        """The layers that the plan gives the live workers; layers on other workers are from an earlier step."""
        return self.plan.placement.without(self.lost) if self.lost else self.plan.placement

    @property
    def held(self) -> Placement:
        """The layers that the live workers, and those that leave, hold and can send."""
        if self.holdings is None and self.leaving:
            senders = self.senders.hosts
            return self.plan.placement.without([worker for worker in self.lost if worker not in senders])
        return self.placement if self.holdings is None else self.holdings

    @cached_property
    def senders(self) -> Cluster:
        """The cluster with the workers that leave."""
        cluster = self.costs.cluster
        return cluster.of((*cluster.workers, *self.leaving))

    @property
    def migration_factor(self) -> float:
        """Seconds of a migration over those that messages and links explain.

        Before one has been measured: layers move while parameters are constant, at any time of a step but during its
        vote and its update, which are what the estimate of a step leaves out.
        """
        if self.measured_migration_factor is not None:
            return self.measured_migration_factor
        return self.transfer_factor * max(1.0, self.step_factor)

    @property
    def returns(self) -> bool:
        """Whether all workers return to a checkpoint, or a snapshot, because some layer has no holder."""
        return (self.has_checkpoints or self.snapshots is not None) and bool(self.held.unheld_layers)

    @property
    def saves_first(self) -> bool:
        """Whether a return to a checkpoint writes one first: if no worker is lost, and runs may write one then."""
        return self.checkpoints.write_s is not None and not self.lost and not self.held.unheld_layers

    @property
    def return_s(self) -> float:
        """Seconds that a return to a checkpoint, or a snapshot, takes now, including repeated work."""
        if self.snapshots is not None and self.held.unheld_layers:
            return self.snapshots.return_s + self.snapshots.taken.unsaved_s
        written_s = self.checkpoints.write_s if self.saves_first else None
        return self.restart_cost_s + (self.checkpoints.unsaved_s if written_s is None else written_s)


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
