"""Everything that is predicted of a step before it is run: of a program, or of the schedules of its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.estimate.bounds import plan_bound_s
from chameleon_ft.estimate.gradient_sync import SyncEstimate, estimate_sync, sync_after
from chameleon_ft.estimate.memory import MessageBuffers, WorkerMemory, program_memory, workload_memory
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, Program, Timeline, replay
from chameleon_ft.schedule.best import ScheduledPart, step_s_of
from chameleon_ft.schedule.program import records_by_code

__all__ = ["PartsEstimate", "StepEstimate", "bytes_over_capacity", "estimate_parts", "estimate_step", "peak_bytes_of"]


@dataclass(frozen=True, slots=True)
class PartsEstimate:
    """The figures of a `StepEstimate` that decisions are made by.

    Attributes:
        program_s: seconds until the last operation has ended.
        step_s: seconds until all gradients are reduced as well; vote and update come on top.
        peak_bytes: what each worker holds at its worst moment.
    """

    program_s: float
    step_s: float
    peak_bytes: Mapping[int, int]

    def over_capacity(self, costs: CostModel) -> dict[int, int]:
        """Bytes that are missing, by worker, where the peak passes the capacity; unknown capacities are not checked."""
        return bytes_over_capacity(self.peak_bytes, costs)


def estimate_parts(plan: Plan, parts: Sequence[ScheduledPart], costs: CostModel) -> PartsEstimate:
    """The figures of `estimate_step` for the program of these parts, without making it; raises the same errors."""
    made_s: dict[int, dict[tuple[int, int], float]] = {}
    for part in parts:
        made_s |= _made_s(part)
    sync = sync_after(plan.placement, made_s, step_s_of(parts), costs)
    # The same sum as in `StepEstimate`, so that both round alike.
    return PartsEstimate(sync.program_s, sync.program_s + sync.exposed_s, peak_bytes_of(plan, parts, costs))


def peak_bytes_of(plan: Plan, parts: Sequence[ScheduledPart], costs: CostModel) -> dict[int, int]:
    """Bytes that each worker holds at its worst moment if it recomputes as `plan` says and runs the parts' operations.

    The parts may have been scheduled for a plan with other recomputation: the orders of their operations count, not
    their times.
    """
    known: dict[tuple[object, ...], list[int]] = {}
    memory = workload_memory(costs.workload)
    peak_bytes = memory.state_bytes(plan.placement)
    for part in parts:
        schedule, workers = part.schedule, part.component.workers
        recompute = tuple(map(plan.recompute.get, workers))
        layers = [hop.layers for hop in part.component.ways[0]]
        # Pipelines whose stages take equally long share a schedule, even if they are cut differently.
        key = id(schedule), recompute, *layers
        if key not in known:
            records = records_by_code(plan, part.component.routes)[schedule.codes]
            known[key] = memory.moving_bytes(records, schedule.first)
        for worker, own_bytes in zip(workers, known[key], strict=True):
            peak_bytes[worker] += own_bytes
    return peak_bytes


def bytes_over_capacity(peak_bytes: Mapping[int, int], costs: CostModel) -> dict[int, int]:
    """Bytes that are missing, by worker, where the peak passes the capacity; unknown capacities are not checked."""
    found: dict[int, int] = {}
    for worker, peak in peak_bytes.items():
        capacity = costs.cluster.worker(worker).memory_bytes
        if capacity is not None and peak > capacity:
            found[worker] = peak - capacity
    return found


def _made_s(part: ScheduledPart) -> dict[int, dict[tuple[int, int], float]]:
    """By worker and range of layers, the end of the last operation that makes gradients."""
    component, schedule = part.component, part.schedule
    if component.is_pipeline:
        # Each worker has one range, and its last operation makes gradients.
        ends = zip(component.ways[0], schedule.last_s, strict=True)
        return {hop.worker: {(hop.layers.start, hop.layers.stop): end_s} for hop, end_s in ends}
    hops = [hop for route in component.routes for hop in route.hops]
    found: dict[int, dict[tuple[int, int], float]] = {worker: {} for worker in component.workers}
    # B, or W, which are the last of the codes.
    for hop, end_s in zip(hops, schedule.ends_s[-len(hops) :].tolist(), strict=True):
        own, layers = found[hop.worker], (hop.layers.start, hop.layers.stop)
        own[layers] = max(own.get(layers, 0.0), end_s)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Time, gradient sync and memory of a step.

    Attributes:
        timeline: when each operation starts and ends.
        bound_s: seconds below which no program of this plan can end.
        sync: when gradients are reduced.
        memory: worst moment of each worker.
        busy_s: seconds that each worker computes.
    """

    timeline: Timeline
    bound_s: float
    sync: SyncEstimate
    memory: Mapping[int, WorkerMemory]
    busy_s: Mapping[int, float]

    @property
    def program_s(self) -> float:
        """Seconds until the last operation has ended."""
        return self.sync.program_s

    @property
    def step_s(self) -> float:
        """Seconds until all operations have ended and all gradients are reduced; vote and update come on top."""
        return self.program_s + self.sync.exposed_s

    @property
    def gap(self) -> float:
        """By which share of the bound the program is slower than it: 0 is proven optimal for the plan."""
        return self.program_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def bubble(self) -> float:
        """Share of the program's time in which workers are idle, over all workers of the placement."""
        available_s = len(self.busy_s) * self.program_s
        return 1 - sum(self.busy_s.values()) / available_s if available_s else 0.0

    def over_capacity(self, costs: CostModel) -> dict[int, int]:
        """Bytes that are missing, by worker, where the peak passes the capacity; unknown capacities are not checked."""
        return bytes_over_capacity({worker: memory.peak_bytes for worker, memory in self.memory.items()}, costs)


def estimate_step(
    plan: Plan,
    program: Program,
    costs: CostModel,
    *,
    buffers: MessageBuffers = MessageBuffers(),  # noqa: B008 - frozen
) -> StepEstimate:
    """The prediction for one step of `program`, which is one of `plan`.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        NoHolderError: a layer has no holder.
        ProgramError: operations wait for each other for ever.
        ConfigError: the plan has a worker that the cluster does not.
    """
    timeline = replay(program, costs)
    busy_s: dict[int, float] = defaultdict(float, dict.fromkeys(plan.workers, 0.0))
    for timed in timeline.operations:
        busy_s[timed.worker] += timed.end_s - timed.start_s
    return StepEstimate(
        timeline=timeline,
        bound_s=plan_bound_s(plan, costs),
        sync=estimate_sync(plan.placement, timeline, costs),
        memory=FrozenMap(program_memory(program, plan.placement, costs.workload, buffers)),
        busy_s=FrozenMap(busy_s),
    )
