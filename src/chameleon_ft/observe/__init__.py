"""What a run shows and writes down: records, the run directory, the recorder and the view.

The terminal view is in `chameleon_ft.observe.terminal`, apart, because it loads a library that only a live run needs.
"""

from __future__ import annotations

from chameleon_ft.observe.checkpoints import (
    checkpoint_model,
    complete_checkpoints,
    layer_directory,
    mark_complete,
    prune_checkpoints,
)
from chameleon_ft.observe.faults import FaultLog
from chameleon_ft.observe.files import ControlAddress, RunDirectory
from chameleon_ft.observe.plans import CostsFrom, GenerationPlan, read_generation_plans
from chameleon_ft.observe.recorder import Recorder
from chameleon_ft.observe.records import (
    FailureRecord,
    JoinRecord,
    NoticedBy,
    OutcomeRecord,
    RunStatus,
    StepRecord,
    Summary,
    summarize,
)
from chameleon_ft.observe.timelines import RecordedReduction, RecordedStep, TimelineLog, read_recorded_steps
from chameleon_ft.observe.view import NullView, RunInfo, View

__all__ = [
    "ControlAddress",
    "CostsFrom",
    "FailureRecord",
    "FaultLog",
    "GenerationPlan",
    "JoinRecord",
    "NoticedBy",
    "NullView",
    "OutcomeRecord",
    "RecordedReduction",
    "RecordedStep",
    "Recorder",
    "RunDirectory",
    "RunInfo",
    "RunStatus",
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
