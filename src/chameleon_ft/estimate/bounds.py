"""Bounds on the time of a step: below which nothing can be, and above which plain 1F1B is not.

Notation as in `PipelineTimes`: stage i takes f_i, b_i and w_i for a micro-batch, a message to the next c_i; m
micro-batches pass through the pipeline, M through all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.schedule import CostModel, PipelineTimes
from chameleon_ft.schedule._network import builder_of
from chameleon_ft.schedule.components import components
from chameleon_ft.sync import Segment, gradient_segments

__all__ = [
    "one_f_one_b_bound_s",
    "one_f_one_b_period_s",
    "pipeline_bound_s",
    "plan_bound_s",
    "rerouting_bound_s",
    "total_work_bound_s",
]


def one_f_one_b_period_s(times: PipelineTimes) -> float:
    """The steady period of 1F1B with fused backward: seconds from one micro-batch to the next.

    lambda = max over i <= j of [sum_{i..j} (f_k + b_k) + 2 sum_{i..j-1} c_k] / (j - i + 1). A run of stages holds as
    many micro-batches as it has stages, and each has to pass down and up through it; messages are not hidden by 1F1B,
    so the slowest stage alone is not the period.
    """
    work_s = [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]
    worst = 0.0
    for first in range(times.depth):
        path_s = 0.0
        for last in range(first, times.depth):
            path_s += work_s[last] + (2 * times.message_s[last - 1] if last > first else 0.0)
            worst = max(worst, path_s / (last - first + 1))
    return worst


def one_f_one_b_bound_s(times: PipelineTimes, micro_batches: int) -> float:
    """An upper bound on the time of 1F1B with fused backward, for ranking unequal stages without a replay.

    (m - 1) lambda + max over j of [sum_{k<=j} (f_k + b_k) + 2 sum_{k<j} c_k
    + min(p - 1 - j, m - 1) (max_{k<=j} f_k + max_{k<=j} b_k - lambda)].

    The term of the last stage, sum (f + b) + 2 sum c + (m - 1) lambda, is nearly always the largest, and exact where
    stages are equal and messages free. The others are paths that turn round before the last stage: stage j runs p - 1 -
    j forwards ahead, so such a path has as many forwards in a row at one stage behind it, and as many backwards at one
    stage before it. Where these are different stages, one slow forward and the other backward, each such pair may take
    longer than the period.
    """
    period_s = one_f_one_b_period_s(times)
    path_s = slowest_forward_s = slowest_backward_s = longest_s = 0.0
    for stage in range(times.depth):
        path_s += times.forward_s[stage] + times.backward_s[stage]
        path_s += 2 * times.message_s[stage - 1] if stage else 0.0
        slowest_forward_s = max(slowest_forward_s, times.forward_s[stage])
        slowest_backward_s = max(slowest_backward_s, times.backward_s[stage])
        ahead = min(times.depth - 1 - stage, micro_batches - 1)
        longest_s = max(longest_s, path_s + ahead * (slowest_forward_s + slowest_backward_s - period_s))
    return longest_s + (micro_batches - 1) * period_s


def pipeline_bound_s(times: PipelineTimes, micro_batches: int) -> float:
    """A lower bound on the time of one pipeline, whatever the order of its operations.

    At each stage i: the first activation has to come down, sum_{j<i} (f_j + c_j); the stage has m (f_i + b_i) to do;
    and after its last B or I the gradient has to go up, sum_{j<i} (b_j + c_j), and be followed by w_0. With split
    backward the stage has m w_i to do as well, which may be done meanwhile. Fused, this is max_i [sum_{j<i} (f_j + b_j
    + 2 c_j) + m (f_i + b_i)].
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
    """A lower bound on the time of a plan, whatever its program: `pipeline_bound_s` for each worker and its own routes.

    Raises:
        PlanError: the workload has another number of layers than the plan.
        ConfigError: the plan has a worker that the cluster does not.
    """
    builder = builder_of(plan, costs)
    return max(
        builder.part(own.workers, split_backward=plan.splits(own.workers[0]))
        .network(own.ways, own.taken)
        .lower_bound_s()
        for own in components(plan.routes)
    )


def rerouting_bound_s(
    placement: Placement, costs: CostModel, *, micro_batches: int, split_backward: bool = False
) -> float:
    """A lower bound on the time of any plan that keeps `placement` and runs each of its segments on one worker at a
    time.

    A segment is a run of layers with the same holders: a stage, where equal pipelines have lost workers. For r_s equal
    holders of stage s: sum_{j<s} (f_j + b_j + 2 c_j) + ceil(M / r_s) (f_s + b_s); for unequal ones the least time in
    which they can do M such pieces. Stages before are taken at their fastest holder, messages at the fastest link. The
    fixed cost of operations is left out: a worker that holds two segments pays it once.

    Raises:
        NoHolderError: a layer has no holder.
        PlanError: the workload has another number of layers than the placement.
    """
    _check_layers(placement.num_layers, costs)
    bound_s = before_s = after_s = 0.0
    segments = gradient_segments(placement)
    first_weight_s = 0.0
    for index, segment in enumerate(segments):
        speeds = [costs.cluster.worker(worker).speed for worker in segment.holders]
        forward_s, backward_s, weight_s = _work(costs, segment, segments[0], split_backward=split_backward)
        if index == 0:
            first_weight_s = weight_s / max(speeds)
        until_gradient_s = _least_makespan(micro_batches, forward_s + backward_s, speeds)
        all_work_s = _least_makespan(micro_batches, forward_s + backward_s + weight_s, speeds)
        bound_s = max(bound_s, before_s + max(until_gradient_s + after_s + first_weight_s, all_work_s))
        if index < len(segments) - 1:
            message_s = _fastest_message_s(costs, segment, segments[index + 1])
            before_s += forward_s / max(speeds) + message_s
            after_s += backward_s / max(speeds) + message_s
    return bound_s


def total_work_bound_s(costs: CostModel, *, micro_batches: int | None = None) -> float:
    """A lower bound on the time of any plan: all work over the speed of all workers of the cluster.

    `micro_batches` are the workload's unless given. Raises PlanError when the cluster is empty.
    """
    if not costs.cluster.workers:
        raise PlanError("no worker is left to do the work; there is no time in which it gets done")
    per_micro_batch_s = math.fsum(layer.forward_s + layer.least_backward_s for layer in costs.workload.layers)
    count = costs.workload.micro_batches if micro_batches is None else micro_batches
    return count * per_micro_batch_s / math.fsum(worker.speed for worker in costs.cluster.workers)


def _work(costs: CostModel, segment: Segment, first: Segment, *, split_backward: bool) -> tuple[float, float, float]:
    """F, B or I, and W of a segment at speed 1; the last is zero with fused backward."""
    parts = costs.workload.layers[segment.layers.start : segment.layers.stop]
    forward_s = math.fsum(part.forward_s for part in parts)
    if not split_backward:
        return forward_s, math.fsum(part.backward_s for part in parts), 0.0
    least_s = math.fsum(part.least_backward_s for part in parts)
    # A hop that starts at layer 0 has no I, and may go on into this segment.
    may_start_there = not set(segment.holders).isdisjoint(first.holders)
    input_s = 0.0 if may_start_there else math.fsum(min(part.input_grad_s, part.least_backward_s) for part in parts)
    return forward_s, input_s, least_s - input_s


def _least_makespan(pieces: int, piece_s: float, speeds: Sequence[float]) -> float:
    """Least time in which workers of these speeds do equal pieces: each goes to the worker that would end first."""
    ends = [(piece_s / speed, piece_s / speed) for speed in speeds]
    heapq.heapify(ends)
    last_s = 0.0
    for _ in range(pieces):
        last_s, own_s = ends[0]
        heapq.heapreplace(ends, (last_s + own_s, own_s))
    return last_s


def _fastest_message_s(costs: CostModel, before: Segment, after: Segment) -> float:
    num_bytes = costs.message_bytes(before.layers.stop - 1)
    return min(costs.message_s(a, b, num_bytes) for a in before.holders for b in after.holders)


def _check_layers(num_layers: int, costs: CostModel) -> None:
    if num_layers != len(costs.workload.layers):
        raise PlanError(
            f"{num_layers} layers are placed, but the workload has {len(costs.workload.layers)}; "
            "use the workload of the model that is planned"
        )
