"""A first decision, which compiles the kernels that decisions run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan.layouts import data_pipeline_plan
from chameleon_ft.recovery.context import DecisionContext
from chameleon_ft.recovery.decision import decide
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.schedule import CostModel, check_program
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.workload import LayerCost, Workload

COMPILING: Final = (
    "compiling the kernels of scheduling and search, which is done once after an installation: up to a minute"
)
"""Message to a user who waits for `warm_up`."""


def warm_up(tell: Callable[[str], object] | None = None) -> None:
    """Compile the kernels that decisions run, or load them from the cache, so that no decision waits for that.

    If they are to be compiled, `tell` gets the message `COMPILING` first.

    Loading takes some tenths of a second in a process. Compiling, after an installation or without a writable folder
    for the cache, takes some tens of seconds.
    """
    from chameleon_ft.schedule.jit import tell_before_compiling

    tell_before_compiling(None if tell is None else partial(tell, COMPILING))
    layer = LayerCost("layer", 1.0, 1.0, 1.0, 1, 1, 1, 1, gradient_bytes=1, optimizer_bytes=2)
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=3, pp=2, micro_batches=6, split_backward=True)
    workers = tuple(Worker(worker, f"host {worker // 3}", memory_bytes=1000) for worker in plan.workers[1:])
    link = Link(0.1, 10.0)
    cluster = Cluster(workers, link, link)
    context = DecisionContext(
        plan=plan,
        in_flight_limits={},
        costs=CostModel(Workload((layer,) * 4, plan.micro_batches, 1), cluster),
        phases=StallModel(detect_s=0.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0),
        repeat_s=0.0,
        restart_cost_s=0.0,
    )
    course = decide(context, "chameleon", FailureModel(worker_mtbf_s=1.0, prior_failures=1.0)).course
    assert course is not None
    check_program(course.program, course.plan)
    # With little memory the search enumerates all cuts, and reports what is missing. Without gradients to reduce, one
    # search covers all numbers of pipelines.
    for memory_bytes, own in ((18, layer), (1, layer), (18, replace(layer, gradient_bytes=0))):
        few = Cluster(tuple(Worker(worker, "host", memory_bytes=memory_bytes) for worker in range(2)), link, link)
        with contextlib.suppress(InfeasibleError):
            find_plan(CostModel(Workload((own,) * 3, 3, 1), few), effort=None)
