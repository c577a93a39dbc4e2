"""What the workers of a scheduled pipeline hold at the worst, without making a network of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chameleon_ft.estimate._memory_records import MOMENT, OPERATION
from chameleon_ft.estimate.memory import MessageBuffers, Stages
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule._pipelines import PipelineSchedule


def peak_bytes(schedule: PipelineSchedule, layers: Sequence[LayerRange], stages: Stages, *, recompute: bool) -> int:
    """As `schedule_bytes` with what is held all the time, of the worker that needs most.

    Args:
        schedule: of one pipeline, each stage on a worker of its own.
        layers: of the stages.
        stages: of the workload.
        recompute: whether the workers recompute.
    """
    depth, codes = len(layers), schedule.codes
    kind, slot = np.divmod(codes, depth * schedule.micro_batches)
    stage = slot % depth
    first, last = stage == 0, stage == depth - 1
    records = np.zeros(len(codes), OPERATION)
    # There is B, or I and W.
    records["kind"] = np.where(schedule.builder.split_backward & (kind > 0), kind + 1, kind)
    records["hop"] = slot
    records["after"] = -1
    records["stage"] = np.array([stages.number(own, recompute=recompute) for own in layers])[stage]
    records["first"] = first
    records["receives"] = ((kind == 0) & ~first) | ((kind == 1) & ~last)
    records["sends"] = ((kind == 0) & ~last) | ((kind == 1) & ~first)
    starts = np.arange(depth + 1) * (len(codes) // depth)
    worst = stages.worst(records, starts, MessageBuffers())
    moving: list[int] = np.sum([worst[name] for name in MOMENT.names or ()], axis=0).tolist()
    placement = Placement(layers[-1].stop, {number: (own,) for number, own in enumerate(layers)})
    state = stages.state_bytes(placement)
    return max(state[number] + own for number, own in enumerate(moving))
