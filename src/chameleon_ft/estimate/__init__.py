"""The cost of a plan: time, memory, gradient sync and the transition to it, with bounds that certify it.

The paper's own closed forms are in `chameleon_ft.estimate.paper`, apart from these.
"""

from __future__ import annotations

from chameleon_ft.estimate.gradient_sync import SyncEstimate, TimedReduction, estimate_sync, reduction_times
from chameleon_ft.estimate.memory import MemoryUse, MessageBuffers, WorkerMemory, program_memory, workload_memory
from chameleon_ft.estimate.rest import RestEstimate, estimate_rest, lost_share_s
from chameleon_ft.estimate.snapshots import (
    LEAST_SNAPSHOT_COST,
    SNAPSHOT_SHARE,
    SnapshotChoice,
    SnapshotMemory,
    SnapshotRule,
    choose_snapshots,
    expected_snapshot_s,
    host_bytes,
    part_bytes,
    snapshot_memory,
    snapshots_fit,
)
from chameleon_ft.estimate.step import (
    PartsEstimate,
    StepEstimate,
    estimate_parts,
    estimate_step,
    peak_bytes_of,
    pipeline_bound_s,
    plan_bound_s,
    total_work_bound_s,
)
from chameleon_ft.estimate.transition import StallModel, TransitionEstimate, received_layers, state_bytes
from chameleon_ft.schedule.costs import PipelineTimes, pipeline_times

__all__ = [
    "LEAST_SNAPSHOT_COST",
    "SNAPSHOT_SHARE",
    "MemoryUse",
    "MessageBuffers",
    "PartsEstimate",
    "PipelineTimes",
    "RestEstimate",
    "SnapshotChoice",
    "SnapshotMemory",
    "SnapshotRule",
    "StallModel",
    "StepEstimate",
    "SyncEstimate",
    "TimedReduction",
    "TransitionEstimate",
    "WorkerMemory",
    "choose_snapshots",
    "estimate_parts",
    "estimate_rest",
    "estimate_step",
    "estimate_sync",
    "expected_snapshot_s",
    "host_bytes",
    "lost_share_s",
    "part_bytes",
    "peak_bytes_of",
    "pipeline_bound_s",
    "pipeline_times",
    "plan_bound_s",
    "program_memory",
    "received_layers",
    "reduction_times",
    "snapshot_memory",
    "snapshots_fit",
    "state_bytes",
    "total_work_bound_s",
    "workload_memory",
]
