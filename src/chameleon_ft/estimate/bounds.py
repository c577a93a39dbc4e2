"""Lower bounds on the time of a step.

Notation as in `PipelineTimes`: stage i takes f_i, b_i and w_i for a micro-batch, a message to the next c_i; m
micro-batches pass through the pipeline, M through all.
"""

from __future__ import annotations

import math

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Plan
from chameleon_ft.schedule import CostModel, PipelineTimes
from chameleon_ft.schedule._network import builder_of
from chameleon_ft.schedule.components import components

__all__ = ["pipeline_bound_s", "plan_bound_s", "total_work_bound_s"]


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


def total_work_bound_s(costs: CostModel, *, micro_batches: int | None = None) -> float:
    """A lower bound on the time of any plan: all work over the speed of all workers of the cluster.

    `micro_batches` are the workload's unless given. Raises PlanError when the cluster is empty.
    """
    if not costs.cluster.workers:
        raise PlanError("no worker is left to do the work; there is no time in which it gets done")
    per_micro_batch_s = math.fsum(layer.forward_s + layer.least_backward_s for layer in costs.workload.layers)
    count = costs.workload.micro_batches if micro_batches is None else micro_batches
    return count * per_micro_batch_s / math.fsum(worker.speed for worker in costs.cluster.workers)
