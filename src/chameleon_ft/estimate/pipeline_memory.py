"""The memory that a scheduled pipeline needs, without a network of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chameleon_ft.estimate._memory_records import OPERATION
from chameleon_ft.estimate.memory import Stages
from chameleon_ft.plan import LayerRange, Placement, RecomputedLayers
from chameleon_ft.schedule import PipelineSchedule
from chameleon_ft.schedule._records import Integers, Records

__all__ = ["one_f_one_b_bytes", "pipeline_bytes"]

_Flags = npt.NDArray[np.bool_] | bool


def pipeline_bytes(
    schedule: PipelineSchedule,
    layers: Sequence[LayerRange],
    stages: Stages,
    *,
    recompute: Sequence[RecomputedLayers | None],
) -> list[int]:
    """`schedule_bytes` of a pipeline, by stage; `layers` and `recompute` are by stage too."""
    depth = schedule.times.depth
    numbers = [stages.number(own, recompute=again) for own, again in zip(layers, recompute, strict=True)]
    kind, slot = np.divmod(schedule.codes, depth * schedule.micro_batches)
    position = slot % depth
    records = _records(kind, slot, np.array(numbers)[position], before=position > 0, after=position + 1 < depth)
    if schedule.split_backward:
        records["kind"] += kind > 0
    return stages.worst_bytes(records, np.arange(depth + 1) * (len(slot) // depth))


def one_f_one_b_bytes(
    layers: LayerRange, stages: Stages, *, num_layers: int, to_end: int, micro_batches: int, recompute: bool
) -> int:
    """Peak bytes of one stage of a pipeline under 1F1B with fused backward.

    Walks the stage's own operations as `program_memory` does; a worker's peak does not depend on the other stages.

    Args:
        layers: layers of the stage.
        stages: those of the workload.
        num_layers: layers of the model.
        to_end: stages from this one to the end of the pipeline, both included; 1 at the last one.
        micro_batches: those that pass through the pipeline in a step.
        recompute: whether the stage recomputes all its layers in full.
    """
    warm_up = min(to_end, micro_batches)
    kind = np.concatenate(
        (np.zeros(warm_up, np.int64), np.tile([1, 0], micro_batches - warm_up), np.ones(warm_up, np.int64))
    )
    # Forwards and backwards each take the micro-batches in order.
    micro_batch = np.where(kind == 0, np.cumsum(kind == 0), np.cumsum(kind == 1)) - 1
    number = stages.number(layers, recompute=RecomputedLayers.in_full(layers) if recompute else None)
    records = _records(kind, micro_batch, number, before=layers.start > 0, after=layers.stop < num_layers)
    (moving,) = stages.worst_bytes(records, np.array([0, len(records)]))
    return stages.state_bytes(Placement(num_layers, {0: (layers,)}))[0] + moving


def _records(kind: Integers, hop: Integers, stage: Integers | int, *, before: _Flags, after: _Flags) -> Records:
    """`OPERATION` of F (kind 0), B (1), or I (1) and W (2), for hops with another stage before or after them."""
    records = np.zeros(len(kind), OPERATION)
    records["kind"] = kind
    records["hop"] = hop
    records["after"] = -1
    records["stage"] = stage
    records["first"] = np.logical_not(before)
    records["receives"] = np.where(kind == 0, before, (kind == 1) & after)
    # The two neighbours; which workers they are does not matter.
    records["sends_to"] = np.where((kind == 0) & after, 1, np.where((kind == 1) & before, 0, -1))
    return records
