"""The cost of a plan: time, memory, gradient sync and the transition to it, with bounds that certify it."""

from __future__ import annotations

from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.memory import MemoryUse, WorkerMemory, program_memory, workload_memory
from chameleon_ft.cost.presets import Execution, device, model_shape
from chameleon_ft.cost.step import StepEstimate, estimate_step, plan_bound_s, total_work_bound_s
from chameleon_ft.cost.transition import StallModel, TransitionEstimate

__all__ = [
    "Execution",
    "MemoryUse",
    "StallModel",
    "StepEstimate",
    "TransitionEstimate",
    "WorkerMemory",
    "derive_workload",
    "device",
    "estimate_step",
    "model_shape",
    "plan_bound_s",
    "program_memory",
    "total_work_bound_s",
    "workload_memory",
]
