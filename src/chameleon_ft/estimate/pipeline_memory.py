"""The memory that a scheduled pipeline needs, for which there need not be a network of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chameleon_ft.estimate._memory_records import OPERATION
from chameleon_ft.estimate.memory import Stages
from chameleon_ft.schedule._pipelines import PipelineSchedule

__all__ = ["pipeline_bytes"]


def pipeline_bytes(schedule: PipelineSchedule, stages: Stages, *, recompute: Sequence[bool]) -> list[int]:
    """As `schedule_bytes` has it, by stage; `recompute` says which of them do so."""
    hops, split = schedule.hops, schedule.builder.split_backward
    numbers = [stages.number(hop.layers, recompute=again) for hop, again in zip(hops, recompute, strict=True)]
    kind, slot = np.divmod(schedule.codes, len(hops) * schedule.micro_batches)
    position = slot % len(hops)
    before, after = position > 0, position + 1 < len(hops)
    records = np.zeros(len(slot), OPERATION)
    records["kind"] = kind + (kind > 0) if split else kind
    records["hop"] = slot
    records["after"] = -1
    records["stage"] = np.array(numbers)[position]
    records["first"] = ~before
    records["receives"] = np.where(kind == 0, before, (kind == 1) & after)
    records["sends"] = np.where(kind == 0, after, (kind == 1) & before)
    return stages.worst_bytes(records, np.arange(len(hops) + 1) * (len(slot) // len(hops)))
