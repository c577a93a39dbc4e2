"""Records of a run, the run directory, the recorder, the terminal view, pictures and traces.

The modules that load rich or matplotlib are not imported here.
"""

from __future__ import annotations

from chameleon_ft.observe.checkpoints import (
    complete_checkpoints,
    damage_of,
    discard_checkpoint,
    incomplete_checkpoints,
    is_complete,
    layer_part,
    link_checkpoint,
    mark_complete,
    mark_damaged,
    prune_checkpoints,
    read_mark,
    require_sound,
    slice_part,
    sound_checkpoint,
)
from chameleon_ft.observe.file_queue import FileQueue
from chameleon_ft.observe.files import ControlAddress, FaultLog, RunDirectory, detach, replace_file
from chameleon_ft.observe.lines import read_lines
from chameleon_ft.observe.plans import CostsFrom, GenerationPlan, read_generation_plans
from chameleon_ft.observe.recorder import Recorder, RecordLine, View, line_of
from chameleon_ft.observe.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    NoticedBy,
    OtherRecord,
    OutcomeRecord,
    RunInfo,
    RunRecord,
    RunStatus,
    StepRecord,
    Summary,
    summarize,
)
from chameleon_ft.observe.run_storage import checkpoint_storage, record_copies
from chameleon_ft.observe.seals import checked_files, seal_layer
from chameleon_ft.observe.storage import Directory, Storage, storage_of
from chameleon_ft.observe.timelines import RecordedReduction, RecordedStep, StepPart, TimelineLog, read_recorded_steps

__all__ = [
    "ControlAddress",
    "CostsFrom",
    "Directory",
    "FailureCostRecord",
    "FailureRecord",
    "FaultLog",
    "FileQueue",
    "GenerationPlan",
    "JoinRecord",
    "NoticedBy",
    "OtherRecord",
    "OutcomeRecord",
    "RecordLine",
    "RecordedReduction",
    "RecordedStep",
    "Recorder",
    "RunDirectory",
    "RunInfo",
    "RunRecord",
    "RunStatus",
    "StepPart",
    "StepRecord",
    "Storage",
    "Summary",
    "TimelineLog",
    "View",
    "checked_files",
    "checkpoint_storage",
    "complete_checkpoints",
    "damage_of",
    "detach",
    "discard_checkpoint",
    "incomplete_checkpoints",
    "is_complete",
    "layer_part",
    "line_of",
    "link_checkpoint",
    "mark_complete",
    "mark_damaged",
    "prune_checkpoints",
    "read_generation_plans",
    "read_lines",
    "read_mark",
    "read_recorded_steps",
    "record_copies",
    "replace_file",
    "require_sound",
    "seal_layer",
    "slice_part",
    "sound_checkpoint",
    "storage_of",
    "summarize",
]
