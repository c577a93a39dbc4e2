"""The memory that schedules need, which are not programs yet: to make one takes longer than to look at its memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from chameleon_ft.estimate._memory_records import MOMENT, OPERATION
from chameleon_ft.estimate.memory import MessageBuffers, Stages
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule._engine import Schedule
from chameleon_ft.schedule._pipelines import PipelineSchedule
from chameleon_ft.schedule._records import Integers, Records

__all__ = ["pipeline_bytes", "schedule_bytes"]


def schedule_bytes(schedule: Schedule, stages: Stages, *, recompute: Collection[int] = ()) -> list[int]:
    """Bytes that each worker, by index, holds beside those at its worst moment; some workers may recompute.

    As `program_memory` has it of a program.
    """
    network = schedule.network
    slots, count = network.slots, len(network.slots)
    recomputes = [worker in recompute for worker in network.workers]
    # One number for each of start, stop and whether the worker recomputes: to sort rows takes many times as long.
    width = int(slots["stop"].max()) + 1
    keys = (slots["start"] * width + slots["stop"]) * 2 + np.array(recomputes)[slots["worker"]]
    ranges, stage_of = np.unique(keys, return_inverse=True)
    numbers = [stages.number(LayerRange(*divmod(key // 2, width)), recompute=bool(key % 2)) for key in ranges.tolist()]
    # Whether the hop before, and the one after, is on another worker.
    apart = slots["worker"][1:] != slots["worker"][:-1]
    first, last = slots["up"] < 0, slots["last"]
    before, after = ~first, ~last
    before[1:] &= apart
    after[:-1] &= apart
    kind, slot = np.divmod(schedule.codes, count)
    records = np.zeros(len(slot), OPERATION)
    records["kind"] = np.where(network.split_backward & (kind > 0), kind + 1, kind)
    records["hop"] = slot
    records["after"] = np.where(~last & ~after, np.arange(count) + 1, -1)[slot]
    records["stage"] = np.array(numbers)[stage_of][slot]
    records["first"] = first[slot]
    records["receives"] = np.where(kind == 0, before[slot], (kind == 1) & after[slot])
    records["sends"] = np.where(kind == 0, after[slot], (kind == 1) & before[slot])
    return _worst_bytes(records, network.first, stages)


def pipeline_bytes(schedule: PipelineSchedule, stages: Stages, *, recompute: Sequence[bool]) -> list[int]:
    """The same of a pipeline, by stage, for which it needs no network. `recompute` says which stages do so."""
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
    return _worst_bytes(records, np.arange(len(hops) + 1) * (len(slot) // len(hops)), stages)


def _worst_bytes(records: Records, first: Integers, stages: Stages) -> list[int]:
    worst = stages.worst(records, first, MessageBuffers())
    found: list[int] = np.sum([worst[name] for name in MOMENT.names or ()], axis=0).tolist()
    return found
