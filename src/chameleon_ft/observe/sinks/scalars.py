"""The numbers of a record by name, for tools that draw curves."""

from __future__ import annotations

import math
from collections.abc import Iterator

from chameleon_ft.observe.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OtherRecord,
    OutcomeRecord,
    RunRecord,
    StepRecord,
)
from chameleon_ft.observe.story import PHASES


def scalars_of(record: RunRecord) -> dict[str, float]:
    """Return the numbers of a record that are finite and known; their names have the form "group/name"."""
    return {name: value for name, value in _scalars(record) if value is not None and math.isfinite(value)}


def _scalars(record: RunRecord) -> Iterator[tuple[str, float | None]]:
    match record:
        case StepRecord():
            yield "train/loss", record.loss
            yield "train/grad_norm", record.grad_norm
            yield "train/learning_rate", record.lr
            yield "pace/step_s", record.step_s
            yield "pace/data_wait_s", record.data_wait_s
            yield "pace/tokens_per_s", record.tokens_per_s
            yield "run/workers", record.workers
            yield "run/generation", record.generation
        case FailureRecord():
            for field, name in PHASES.items():
                yield f"failures/{name}_s", getattr(record, field) or 0.0
            yield "failures/stall_s", record.stall_s
            yield "failures/repeated_s", record.repeated_s or 0.0
        case FailureCostRecord():
            yield "failures/cost_steps", record.failure_cost_steps
        case OutcomeRecord():
            yield "predictions/step_error", record.step_error
            yield "predictions/stall_error", record.stall_error
        case JoinRecord():
            yield "switches/stall_s", record.stall_s
        case OtherRecord(event="checkpoint", fields=fields):
            yield "checkpoints/copy_s", fields["copy_s"]
            yield "checkpoints/write_s", fields["write_s"]
