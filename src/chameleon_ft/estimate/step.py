"""Predictions for a step before it runs: lower bounds, time and memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.errors import PlanError
from chameleon_ft.estimate.gradient_sync import SyncEstimate, estimate_sync, sync_after
from chameleon_ft.estimate.memory import WorkerMemory, program_memory, workload_memory
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, PipelineTimes, Program, Timeline, replay
from chameleon_ft.schedule.best import ScheduledPart, step_s_of
from chameleon_ft.schedule.network import component_builders
from chameleon_ft.schedule.program import records_by_code


def pipeline_bound_s(times: PipelineTimes, micro_batches: int) -> float:
    """Return a lower bound on the time of one pipeline over all orders of operations; notation as in `PipelineTimes`.

    Of m micro-batches, at each stage i: the first activation has to come down, sum_{j<i} (f_j + c_j); the stage has
    m (f_i + b_i) to do; and after its last B or I the gradient has to go up, sum_{j<i} (b_j + c_j), and be followed by
    w_0. With split backward the stage has m w_i to do as well, which may be done meanwhile. Fused, this is max_i
    [sum_{j<i} (f_j + b_j + 2 c_j) + m (f_i + b_i)].
    """
    bound_s = before_s = after_s = 0.0
    for stage in range(times.depth):
        work_s = micro_batches * (times.forward_s[stage] + times.backward_s[stage])
        tail_s = max(micro_batches * times.weight_grad_s[stage], after_s + times.weight_grad_s[0])
        bound_s = max(bound_s, before_s + work_s + tail_s)
        if stage < times.depth - 1:
            before_s += times.forward_s[stage] + times.message_s[stage]
            after_s += times.backward_s[stage] + times.message_s[stage]
    return bound_s


def plan_bound_s(plan: Plan, costs: CostModel) -> float:
    """Return a lower bound on the time of a plan's programs: `pipeline_bound_s` for each worker and its own routes.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    return max(
        builder.network(component.paths, component.path_of).lower_bound_s()
        for component, builder in component_builders(plan, costs)
    )


def total_work_bound_s(costs: CostModel, *, micro_batches: int | None = None) -> float:
    """Return a lower bound on the time of any plan: all work over the speed of all workers of the cluster.

    `micro_batches` are the workload's unless given. Raises PlanError when the cluster is empty.
    """
    if not costs.cluster.workers:
        raise PlanError("no worker is left to do the work")
    per_micro_batch_s = math.fsum(layer.forward_s + layer.least_backward_s for layer in costs.workload.layers)
    count = costs.workload.micro_batches if micro_batches is None else micro_batches
    return count * per_micro_batch_s / math.fsum(worker.speed for worker in costs.cluster.workers)


@dataclass(frozen=True, slots=True)
class PartsEstimate:
    """The figures of a `StepEstimate` on which decisions are based.

    Attributes:
        program_s: seconds until the last operation has ended.
        step_s: seconds until all gradients are reduced as well; vote and update come on top.
        peak_bytes: what each worker holds at its worst moment.
    """

    program_s: float
    step_s: float
    peak_bytes: Mapping[int, int]

    def over_capacity(self, costs: CostModel) -> dict[int, int]:
        """Return the missing bytes of workers whose peak exceeds their capacity; unknown capacities are not checked."""
        capacities = {worker: costs.cluster.worker(worker).memory_bytes for worker in self.peak_bytes}
        return {
            worker: self.peak_bytes[worker] - capacity
            for worker, capacity in capacities.items()
            if capacity is not None and self.peak_bytes[worker] > capacity
        }


def estimate_parts(plan: Plan, parts: Sequence[ScheduledPart], costs: CostModel) -> PartsEstimate:
    """Return the figures of `estimate_step` for the program of these parts, without making it; raises its errors."""
    complete_s: dict[int, dict[tuple[int, int], float]] = {}
    for part in parts:
        complete_s |= _gradient_times(part)
    sync = sync_after(plan.placement, complete_s, step_s_of(parts), costs)
    # Summed as in `StepEstimate`, so that both round alike.
    return PartsEstimate(sync.program_s, sync.program_s + sync.exposed_s, peak_bytes_of(plan, parts, costs))


def peak_bytes_of(plan: Plan, parts: Sequence[ScheduledPart], costs: CostModel, *others: Placement) -> dict[int, int]:
    """Return each worker's peak in bytes if it recomputes as `plan` says and runs the parts' operations.

    The parts may have been scheduled for a plan with other recomputation: the orders of their operations count, not
    their times.

    Args:
        others: placements before or after the plan, if holders that share optimizer state are on the way between them.
    """
    moving_bytes: dict[tuple[object, ...], list[int]] = {}
    memory = workload_memory(costs.workload)
    peak_bytes = memory.state_bytes(plan.placement, *others)
    for part in parts:
        schedule, workers = part.schedule, part.component.workers
        recompute = tuple(map(plan.recompute.get, workers))
        layers = [hop.layers for hops in part.component.paths for hop in hops]
        # Pipelines whose stages take equally long share a schedule, even if they are cut differently.
        key = id(schedule), recompute, *layers
        if key not in moving_bytes:
            records = records_by_code(plan, part.component.routes)[schedule.codes]
            moving_bytes[key] = memory.moving_bytes(records, schedule.first)
        for worker, own_bytes in zip(workers, moving_bytes[key], strict=True):
            peak_bytes[worker] += own_bytes
    return peak_bytes


def _gradient_times(part: ScheduledPart) -> dict[int, dict[tuple[int, int], float]]:
    """By worker and range of layers, the end of the last operation that makes gradients."""
    component, schedule = part.component, part.schedule
    if component.is_pipeline:
        # Each worker has one range, and its last operation makes gradients.
        ends = zip(component.paths[0], schedule.last_s, strict=True)
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
        bound_s: a lower bound on the seconds of any program of this plan.
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
        """Relative distance of the program from the bound: 0 is proven optimal for the plan."""
        return self.program_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def bubble(self) -> float:
        """Share of the program's time in which workers are idle, over all workers of the placement."""
        available_s = len(self.busy_s) * self.program_s
        return 1 - sum(self.busy_s.values()) / available_s if available_s else 0.0

    def over_capacity(self, costs: CostModel) -> dict[int, int]:
        """Return the missing bytes of workers whose peak exceeds their capacity, as `PartsEstimate` does."""
        peak_bytes = {worker: memory.peak_bytes for worker, memory in self.memory.items()}
        return PartsEstimate(self.program_s, self.step_s, peak_bytes).over_capacity(costs)


def estimate_step(plan: Plan, program: Program, costs: CostModel) -> StepEstimate:
    """Predict one step of `program`, which runs `plan`.

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
        memory=FrozenMap(program_memory(program, plan.placement, costs.workload)),
        busy_s=FrozenMap(busy_s),
    )
