"""Predictions for a step, or the rest of one, before it runs: time, lower bounds, gradient sync and memory.

Gradients are reduced segment by segment, in rounds, during the tail of the backward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from chameleon_ft.cost.memory import WorkerMemory, program_memory, workload_memory
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.schedule import CostModel, PipelineTimes, Program, ScheduledRest, Timeline, replay
from chameleon_ft.schedule.best import ScheduledPart, step_s_of
from chameleon_ft.schedule.network import component_builders
from chameleon_ft.schedule.program import KINDS, records_by_code
from chameleon_ft.sync import ADDS_TO_GRADIENTS, Segment, SyncRounds, gradient_rounds, segment_bytes

GradientTimes: TypeAlias = Mapping[int, Mapping[tuple[int, int], float]]
"""By worker, and by the (start, stop) of a range of layers, when its gradients are complete, in seconds."""


@dataclass(frozen=True, slots=True)
class TimedReduction:
    """The all-reduce of a segment, in seconds since the start of the step, and the number of its round."""

    segment: Segment
    round: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SyncEstimate:
    """The reductions of a step.

    Attributes:
        reductions: in the order in which workers issue them; segments without gradients are not among them.
        rounds: their arrangement.
        program_s: end of the last operation.
    """

    reductions: tuple[TimedReduction, ...]
    rounds: SyncRounds
    program_s: float

    @property
    def end_s(self) -> float:
        """When all gradients are reduced and all operations done."""
        return max([self.program_s, *(reduction.end_s for reduction in self.reductions)])

    @property
    def exposed_s(self) -> float:
        """Seconds by which gradient sync makes the step longer."""
        return self.end_s - self.program_s

    @property
    def step_s(self) -> float:
        """Seconds until all operations have ended and all gradients are reduced; vote and update come on top."""
        return self.program_s + self.exposed_s


def estimate_sync(placement: Placement, timeline: Timeline, costs: CostModel) -> SyncEstimate:
    """Predict when each segment is reduced, given when the operations end.

    A worker reduces one segment after the other, in the order (round, first layer), while it computes; a reduction
    starts when all its holders have come to it and have the segment's gradients from all their micro-batches. Segments
    without gradients are skipped. Reductions do not slow down operations or messages.

    Raises:
        NoHolderError: a layer has no holder.
        PlanError: the workload has another number of layers than the placement.
    """
    complete_s: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for timed in timeline.operations:
        if timed.operation.kind in ADDS_TO_GRADIENTS:
            layers = timed.operation.layers
            complete_s[timed.worker][layers.start, layers.stop] = timed.end_s
    return sync_after(placement, complete_s, timeline.step_s, costs)


def sync_after(placement: Placement, complete_s: GradientTimes, program_s: float, costs: CostModel) -> SyncEstimate:
    """Return `estimate_sync` from when gradients are complete, and the end of the last operation of all."""
    rounds = gradient_rounds(placement, costs.workload.tied_layers)
    segments = [
        (number, segment, num_bytes)
        for number, own in enumerate(rounds.rounds)
        for segment in own
        if (num_bytes := segment_bytes(segment, costs.workload))
    ]
    times = reduction_times(
        (
            (
                segment.holders,
                max(_ready_s(complete_s.get(worker, {}), segment) for worker in segment.holders),
                costs.all_reduce_s(segment.layers, segment.holders, num_bytes),
            )
            for _, segment, num_bytes in segments
        ),
        defaultdict(float),
    )
    reductions = (
        TimedReduction(segment, number, start_s, end_s)
        for (number, segment, _), (start_s, end_s) in zip(segments, times, strict=True)
    )
    return SyncEstimate(tuple(reductions), rounds, program_s)


def reduction_times(
    reductions: Iterable[tuple[Collection[int], float, float]], free_s: MutableMapping[int, float]
) -> Iterator[tuple[float, float]]:
    """Yield start and end of reductions in the order in which all workers issue them, in seconds.

    Args:
        reductions: holders, seconds until the gradients are complete on all of them, and duration of each reduction.
        free_s: when each holder can begin its first reduction; updated as the reductions end.
    """
    for holders, ready_s, duration_s in reductions:
        start_s = max(ready_s, *[free_s[holder] for holder in holders])
        end_s = start_s + duration_s
        for holder in holders:
            free_s[holder] = end_s
        yield start_s, end_s


def _ready_s(complete_s: Mapping[tuple[int, int], float], segment: Segment) -> float:
    """When a worker has the gradients of a segment."""
    spans = [(layer, layer + 1) for layer in segment.tied] or [(segment.layers.start, segment.layers.stop)]
    return max(
        (
            end_s
            for (start, stop), end_s in complete_s.items()
            if any(start < last and first < stop for first, last in spans)
        ),
        default=0.0,
    )


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
    per_micro_batch_s = math.fsum(layer.forward_s + layer.min_backward_s for layer in costs.workload.layers)
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
        room = costs.cluster.capacity_bytes
        return {worker: int(own - room(worker)) for worker, own in self.peak_bytes.items() if own > room(worker)}


def estimate_parts(plan: Plan, parts: Sequence[ScheduledPart], costs: CostModel) -> PartsEstimate:
    """Return the figures of `estimate_step` for the program of these parts, without making it; raises its errors."""
    complete_s: dict[int, dict[tuple[int, int], float]] = {}
    for part in parts:
        complete_s |= _gradient_times(part)
    sync = sync_after(plan.placement, complete_s, step_s_of(parts), costs)
    return PartsEstimate(sync.program_s, sync.step_s, peak_bytes_of(plan, parts, costs))


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
    """Return the end of the last operation that makes gradients, by worker and range of layers."""
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
        return self.sync.step_s

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


def estimate_rest(rest: RestOfStep, scheduled: ScheduledRest, costs: CostModel) -> SyncEstimate:
    """Predict when the gradients of the rest of a step are reduced; workers that are not in the cluster are lost.

    Gradients whose sum some workers hold already are reduced all the same, because that hands the sum to the others.

    Raises:
        NoHolderError: a layer has no holder left.
        PlanError: the workload has another number of layers than the plan.
    """
    live = {worker.id for worker in costs.cluster.workers}
    records, starts = scheduled.program.records, scheduled.program.starts
    makes_gradients = np.isin(records["kind"], [KINDS.index(kind) for kind in ADDS_TO_GRADIENTS])
    workers = np.repeat(np.array(scheduled.program.workers, np.int64), np.diff(starts))
    columns = (workers, records["start"], records["stop"], scheduled.ends_s)
    complete_s: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for worker, start, stop, end_s in zip(*(own[makes_gradients].tolist() for own in columns), strict=True):
        complete_s[worker][start, stop] = end_s
    placement = rest.plan.placement.without(set(rest.plan.workers) - live)
    return sync_after(placement, complete_s, scheduled.program_s, costs)


def lost_share_s(placement: Placement, lost: Collection[int], costs: CostModel) -> float:
    """Return by how many seconds the rest of a step takes longer because peers do the share of the lost workers.

    The contributions of a lost worker are gone whenever it fails, so its peers do all of its work of the step. If the
    holders of a layer share its work equally, the loss of k of h holders leaves M k / (h (h - k)) micro-batches to each
    of the others, and half of one more, because micro-batches are not divided. The sum of their seconds over the layers
    of a lost worker counts, and the largest one of all lost workers. Idle time of the peers may hide some of it, and a
    pipeline that has to fill again may add to it. Infinite if a layer has no holder left.
    """
    gone, layers = set(lost), costs.workload.layers

    def more_s(layer: int) -> float:
        holders = placement.holders(layer)
        left = sum(worker not in gone for worker in holders)
        if not left:
            return math.inf
        more = costs.workload.micro_batches * (len(holders) - left) / (len(holders) * left) + 0.5
        return more * (layers[layer].forward_s + layers[layer].backward_s)

    ranges = {own for worker in gone for own in placement.ranges_of(worker)}
    by_layer = {layer: more_s(layer) for own in ranges for layer in own}
    return max(
        (math.fsum(by_layer[layer] for layer in placement.layers_of(worker)) for worker in gone),
        default=0.0,
    )
