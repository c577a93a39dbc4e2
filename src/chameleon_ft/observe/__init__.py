"""Records of a run, the run directory, the recorder, the terminal view, pictures and traces.

The modules that load rich or matplotlib are not imported here.
"""

from __future__ import annotations

from chameleon_ft.observe.files import (
    ControlAddress,
    FaultLog,
    RunDirectory,
    checkpoint_model,
    complete_checkpoints,
    layer_directory,
    mark_complete,
    prune_checkpoints,
)
from chameleon_ft.observe.plans import CostsFrom, GenerationPlan, read_generation_plans
from chameleon_ft.observe.recorder import Recorder, View
from chameleon_ft.observe.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    NoticedBy,
    OutcomeRecord,
    RunInfo,
    RunStatus,
    StepRecord,
    Summary,
    summarize,
)
from chameleon_ft.observe.timelines import RecordedReduction, RecordedStep, StepPart, TimelineLog, read_recorded_steps

__all__ = [
    "ControlAddress",
    "CostsFrom",
    "FailureCostRecord",
    "FailureRecord",
    "FaultLog",
    "GenerationPlan",
    "JoinRecord",
    "NoticedBy",
    "OutcomeRecord",
    "RecordedReduction",
    "RecordedStep",
    "Recorder",
    "RunDirectory",
    "RunInfo",
    "RunStatus",
    "StepPart",
    "StepRecord",
    "Summary",
    "TimelineLog",
    "View",
    "checkpoint_model",
    "complete_checkpoints",
    "layer_directory",
    "mark_complete",
    "prune_checkpoints",
    "read_generation_plans",
    "read_recorded_steps",
    "summarize",
]
