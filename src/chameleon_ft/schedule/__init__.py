"""Programs: what each worker runs in a step, in which order, and how long that takes."""

from __future__ import annotations

from chameleon_ft.schedule.best import (
    PipelineSchedule,
    ScheduledProgram,
    best_program,
    list_schedule,
    pipeline_schedule,
)
from chameleon_ft.schedule.check import check_program, check_rest
from chameleon_ft.schedule.list_scheduler import InFlightLimit, default_limits
from chameleon_ft.schedule.network import CostModel, PipelineTimes, TimedOperation, Timeline, replay
from chameleon_ft.schedule.program import Operation, OperationKind, Program, forwards_of
from chameleon_ft.schedule.rest import Resend, ScheduledRest, rest_schedules

__all__ = [
    "CostModel",
    "InFlightLimit",
    "Operation",
    "OperationKind",
    "PipelineSchedule",
    "PipelineTimes",
    "Program",
    "Resend",
    "ScheduledProgram",
    "ScheduledRest",
    "TimedOperation",
    "Timeline",
    "best_program",
    "check_program",
    "check_rest",
    "default_limits",
    "forwards_of",
    "list_schedule",
    "pipeline_schedule",
    "replay",
    "rest_schedules",
]
