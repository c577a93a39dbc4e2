"""A first decision, for which nobody waits."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Final

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.estimate import StallModel
from chameleon_ft.plan.layouts import data_pipeline_plan
from chameleon_ft.recovery.decision import decide
from chameleon_ft.recovery.decision_context import DecisionContext
from chameleon_ft.recovery.failure_model import FailureModel
from chameleon_ft.schedule import CostModel, check_program
from chameleon_ft.search import InfeasibleError, find_plan
from chameleon_ft.workload import LayerCost, Workload

__all__ = ["COMPILING", "COMPILING_AFTER_S", "warm_up"]

COMPILING: Final = "compiling what schedules and searches, once after an installation: up to a minute"
"""What to tell those who wait for `warm_up` long."""
COMPILING_AFTER_S: Final = 3.0
"""Seconds after which they are told: more than it takes from the second time on."""


def warm_up() -> None:
    """Compile what decisions run, or load it where that was done before, so that the first one need not wait for it.

    That takes some tenths of a second in a process; after an installation, and wherever no folder can be written in
    which what was compiled is kept, some tens of seconds.
    """
    layer = LayerCost(
        "layer",
        1.0,
        1.0,
        1.0,
        param_bytes=1,
        gradient_bytes=1,
        optimizer_bytes=2,
        activation_bytes=1,
        weight_grad_bytes=1,
        output_bytes=1,
    )
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
        restart_s=0.0,
    )
    course = decide(context, "chameleon", FailureModel(worker_mtbf_s=1.0, prior_failures=1.0)).course
    assert course is not None
    check_program(course.program, course.plan)
    # Where memory is short, all cuts are gone through, and it is asked what is missing. Where nothing is reduced, there
    # is one search for all numbers of pipelines.
    for memory_bytes, own in ((18, layer), (1, layer), (18, replace(layer, gradient_bytes=0))):
        few = Cluster(tuple(Worker(worker, "host", memory_bytes=memory_bytes) for worker in range(2)), link, link)
        with contextlib.suppress(InfeasibleError):
            find_plan(CostModel(Workload((own,) * 3, 3, 1), few), effort=None)
