"""Step time and memory of a plan from the schedules of its parts, without a program: enough to compare plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chameleon_ft.estimate.gradient_sync import sync_after
from chameleon_ft.estimate.memory import workload_memory
from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule._orders import records_by_code
from chameleon_ft.schedule.best import ScheduledPart, step_s_of
from chameleon_ft.schedule.list_scheduler import Schedule
from chameleon_ft.schedule.pipelines import PipelineSchedule

__all__ = ["PartsEstimate", "bytes_over_capacity", "estimate_parts", "peak_bytes_of"]

# By range of layers, the first and the one after the last, the end of the last operation that makes gradients.
_Made = dict[tuple[int, int], float]


@dataclass(frozen=True, slots=True)
class PartsEstimate:
    """The figures of a `StepEstimate` that decisions are made by.

    Attributes:
        program_s: seconds until the last operation has ended.
        step_s: seconds until all gradients are reduced as well; vote and update come on top.
        peak_bytes: what each worker holds at its worst moment.
    """

    program_s: float
    step_s: float
    peak_bytes: Mapping[int, int]

    def over_capacity(self, costs: CostModel) -> dict[int, int]:
        """Bytes that are missing, by worker, where the peak passes the capacity; unknown capacities are not checked."""
        return bytes_over_capacity(self.peak_bytes, costs)


def estimate_parts(plan: Plan, parts: Sequence[ScheduledPart], costs: CostModel) -> PartsEstimate:
    """The figures of `estimate_step` for the program of these parts, without making it; raises the same errors."""
    # By schedule and layers, which parts that are alike share, the figures of each worker index.
    known: dict[tuple[object, ...], list[_Made]] = {}
    made_s: dict[int, _Made] = {}
    for part in parts:
        schedule = part.schedule
        layers = [hop.layers for hop in part.component.ways[0]]
        key = id(schedule), *layers
        if key not in known:
            known[key] = _made_s(schedule, layers)
        made_s.update(zip(part.component.workers, known[key], strict=True))
    sync = sync_after(plan.placement, made_s, step_s_of(parts), costs)
    # The same sum as in `StepEstimate`, so that both round alike.
    return PartsEstimate(sync.program_s, sync.program_s + sync.exposed_s, peak_bytes_of(plan, parts, costs))


def peak_bytes_of(plan: Plan, parts: Sequence[ScheduledPart], costs: CostModel) -> dict[int, int]:
    """Bytes that each worker holds at its worst moment if it recomputes as `plan` says and runs the parts' operations.

    The parts may have been scheduled for a plan with other recomputation: the orders of their operations count, not
    their times.
    """
    known: dict[tuple[object, ...], list[int]] = {}
    memory = workload_memory(costs.workload)
    peak_bytes = memory.state_bytes(plan.placement)
    for part in parts:
        schedule, workers = part.schedule, part.component.workers
        recompute = tuple(map(plan.recompute.get, workers))
        layers = [hop.layers for hop in part.component.ways[0]]
        # Pipelines whose stages take equally long share a schedule, even if they are cut differently.
        key = id(schedule), recompute, *layers
        if key not in known:
            records = records_by_code(plan, part.component.routes)[schedule.codes]
            known[key] = memory.moving_bytes(records, np.cumsum([0, *map(len, schedule.orders)]))
        for worker, own_bytes in zip(workers, known[key], strict=True):
            peak_bytes[worker] += own_bytes
    return peak_bytes


def bytes_over_capacity(peak_bytes: Mapping[int, int], costs: CostModel) -> dict[int, int]:
    """Bytes that are missing, by worker, where the peak passes the capacity; unknown capacities are not checked."""
    found: dict[int, int] = {}
    for worker, peak in peak_bytes.items():
        capacity = costs.cluster.worker(worker).memory_bytes
        if capacity is not None and peak > capacity:
            found[worker] = peak - capacity
    return found


def _made_s(schedule: Schedule | PipelineSchedule, layers: Sequence[LayerRange]) -> list[_Made]:
    """By worker index and range of layers, the end of the last operation that makes gradients.

    A stage of a pipeline has one range, of `layers`, and its last operation makes gradients.
    """
    if isinstance(schedule, PipelineSchedule):
        return [{(own.start, own.stop): end_s} for own, end_s in zip(layers, schedule.last_s, strict=True)]
    slots = schedule.network.slots
    found: list[_Made] = [defaultdict(float) for _ in schedule.network.workers]
    workers, starts, stops = (slots[name].tolist() for name in ("worker", "start", "stop"))
    # B, or W, which are the last of the codes.
    for worker, start, stop, end_s in zip(workers, starts, stops, schedule.ends_s[-len(slots) :].tolist(), strict=True):
        found[worker][start, stop] = max(found[worker][start, stop], end_s)
    return found
