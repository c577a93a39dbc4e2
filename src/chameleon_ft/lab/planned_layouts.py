"""The pipelines that a published planner chooses, placed and scheduled so that they compare with our own plans."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeAlias

from chameleon_ft.cost.memory import MessageBuffers, workload_memory
from chameleon_ft.cost.presets import Recompute
from chameleon_ft.plan import (
    LayerRange,
    PipelineLayout,
    Placement,
    Plan,
    RecomputedLayers,
    pipelines_plan,
    split_layers,
)
from chameleon_ft.schedule import CostModel, InFlightLimit, default_limits
from chameleon_ft.schedule.best import DEFAULT_EFFORT
from chameleon_ft.search.placement import predicted, worker_choices
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.search.worker_classes import WorkerPool
from chameleon_ft.workload import Workload

CutPoints: TypeAlias = tuple[int, ...]
"""The layer after the last one of each stage of a pipeline."""

# Operations that may be scheduled for each part of a plan that is only compared with others.
_COMPARE_EFFORT: Final = 10_000
# Steady 1F1B repeats itself, so a stage holds no more with more micro-batches than it has in flight and in buffers.
_BUFFERED: Final = MessageBuffers().receives_ahead + MessageBuffers().sends_kept
# So that there is a choice of depths where the number of workers is a prime, some workers stay idle.
_MIN_DEPTHS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinePlan:
    """The plan that a published planner chooses.

    Attributes:
        found: the plan, with this package's own prediction of it.
        estimate_s: seconds of a step by the planner's own estimate, which the plan was chosen by.
    """

    found: FoundPlan
    estimate_s: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipelines on workers that are all alike, which is how published planners see them.

    Attributes:
        pipelines: cut points and micro-batches of each.
        recompute: True if all workers recompute activations.
        estimate_s: seconds of a step by the planner's own estimate.
    """

    pipelines: tuple[tuple[CutPoints, int], ...]
    recompute: bool
    estimate_s: float


class OneFOneBMemory:
    """Whether stages under 1F1B fit the smallest worker.

    Attributes:
        workload: costs of the layers.
        capacity_bytes: memory of the smallest worker; None if no worker's is known.
        recompute: all workers recompute activations.
    """

    def __init__(self, workload: Workload, capacity_bytes: int | None, *, recompute: bool) -> None:
        self.workload = workload
        self.capacity_bytes = capacity_bytes
        self.recompute = recompute
        self._memory = workload_memory(workload)

    def fits_without_messages(self, start: int, stop: int, *, in_flight: int) -> bool:
        """Return whether the state of layers `start` to `stop` fits, with activations of so many micro-batches."""
        recompute = Recompute.FULL if self.recompute else Recompute.NONE
        needed = self._memory.min_stage_bytes(start, stop, in_flight=in_flight, recompute=recompute)
        return self.capacity_bytes is None or needed <= self.capacity_bytes

    def fits(self, start: int, stop: int, *, to_end: int, micro_batches: int) -> bool:
        """Return whether a stage of layers `start` to `stop` fits, `to_end` stages from the end, 1 at the last one."""
        if self.capacity_bytes is None:
            return True
        # Less than that, without messages and work space, no stage needs when its warm-up has ended.
        if not self.fits_without_messages(start, stop, in_flight=min(to_end, micro_batches)):
            return False
        share = min(micro_batches, to_end + _BUFFERED)
        needed = self._memory.one_f_one_b_bytes(
            start, stop, to_end=to_end, micro_batches=share, recompute=self.recompute
        )
        return needed <= self.capacity_bytes

    def max_in_flight(self, layers: LayerRange, *, at_most: int, micro_batches: int) -> int:
        """Return how many micro-batches a stage can keep in flight, up to `at_most`; 1 at the least."""
        return 1 + bisect_left(
            range(2, at_most + 1),
            True,
            key=lambda count: not self.fits(layers.start, layers.stop, to_end=count, micro_batches=micro_batches),
        )

    def fits_all(self, cut_points: CutPoints, micro_batches: int) -> bool:
        """Return whether all stages of a pipeline fit."""
        return all(
            self.fits(*stage, to_end=len(cut_points) - position, micro_batches=micro_batches)
            for position, stage in enumerate(pairwise((0, *cut_points)))
        )


# Shared by all plans for a workload: a policy asks again after each loss.
_shared_memory = lru_cache(maxsize=8)(OneFOneBMemory)


def memory_of(costs: CostModel, *, recompute: bool) -> OneFOneBMemory:
    """Return the memory of the workload's stages on the cluster; the least known capacity counts."""
    known = [each.memory_bytes for each in costs.cluster.workers if each.memory_bytes is not None]
    return _shared_memory(costs.workload, min(known, default=None), recompute=recompute)


def fastest_layout(
    name: str,
    layouts: Iterable[Layout],
    costs: CostModel,
    *,
    split_backward: bool,
    current: Placement | None,
) -> BaselinePlan | None:
    """Return the layout that a replay finds fastest, on the workers that suit it best; None if none fits their memory.

    With fused backward, programs are 1F1B. With split backward, they are by `best_program`, with as many micro-batches
    in flight as fit the memory, and those of 1F1B at the least.
    """
    # Published planners take all workers to be alike.
    workers = tuple(replace(worker, speed=1.0, memory_bytes=None) for worker in costs.cluster.workers)
    alike = costs.cluster.of(workers)
    pool = WorkerPool.of(alike)
    compared: list[tuple[float, Plan, Layout]] = []
    for layout in layouts:
        cuts = [cut_points for cut_points, _ in layout.pipelines]
        shapes = [(0,) * len(cut_points) for cut_points in cuts]
        for workers_of in worker_choices(shapes, cuts, pool, alike, with_sync=True, usual=True):
            pipelines = [
                PipelineLayout(cut_points, own, micro_batches)
                for (cut_points, micro_batches), own in zip(layout.pipelines, workers_of, strict=True)
            ]
            hops = [hop for pipeline in pipelines for hop in pipeline.hops] if layout.recompute else []
            recompute = {hop.worker: RecomputedLayers.in_full(hop.layers) for hop in hops}
            plan = pipelines_plan(pipelines, split_backward=split_backward, recompute=recompute)
            found = _fitting(name, plan, costs, current, effort=_COMPARE_EFFORT)
            if found is not None:
                compared.append((found.step_s, plan, layout))
    for _, plan, layout in sorted(compared, key=lambda each: each[0]):
        found = _fitting(name, plan, costs, current, effort=DEFAULT_EFFORT)
        if found is not None:
            return BaselinePlan(found=found, estimate_s=layout.estimate_s)
    return None


def _fitting(name: str, plan: Plan, costs: CostModel, current: Placement | None, *, effort: float) -> FoundPlan | None:
    """Return the plan with the most micro-batches in flight that fit; None if not even those of 1F1B do."""
    least = {worker: limit.in_flight for worker, limit in default_limits(plan).items()}
    in_flight = dict(least)
    if plan.split_backward:
        # As many as would fit each worker under 1F1B, up to twice the depth of its pipeline.
        memory = memory_of(costs, recompute=bool(plan.recompute))
        for hops, share in Counter(route.hops for route in plan.routes).items():
            for hop in hops:
                most = memory.max_in_flight(hop.layers, at_most=2 * len(hops), micro_batches=share)
                in_flight[hop.worker] = max(least[hop.worker], most)
    while True:
        in_flight_limits = {worker: InFlightLimit(count, count) for worker, count in in_flight.items()}
        found, missing = predicted(name, plan, costs, current, in_flight_limits, effort=effort)
        if not missing:
            return found
        # One less at a time near the least, and larger steps far from it.
        spare = {worker: in_flight[worker] - least[worker] for worker in missing}
        fewer = {worker: in_flight[worker] - max(1, count // 8) for worker, count in spare.items() if count}
        if not fewer:
            return None
        in_flight |= fewer


def equal_layouts(costs: CostModel, *, split_backward: bool) -> list[FoundPlan]:
    """Return the fastest plan of equal pipelines for each depth that fits the memory, the shallowest first.

    A policy that never changes the depth of its pipelines depends on the depth that it begins with, and the fastest one
    is not always the best with detours. Pipelines of one depth use up the workers; if fewer than two such depths fit,
    one worker stays idle, and so on. Workers recompute activations where that is faster or where nothing else fits, and
    backward is fused where split backward does not fit. Shares of the micro-batches differ by one at most.

    Args:
        costs: costs of the workload on the live workers.
        split_backward: True if plans run our programs with split backward, and not 1F1B.
    """
    found: dict[int, FoundPlan] = {}
    for used in range(len(costs.cluster.workers), 0, -1):
        for depth in range(1, min(used, len(costs.workload.layers)) + 1):
            if used % depth == 0 and depth not in found and used // depth <= costs.workload.micro_batches:
                plan = _fastest(depth, used // depth, costs, split_backward=split_backward)
                if plan is not None:
                    found[depth] = plan
        if len(found) >= _MIN_DEPTHS:
            break
    return [found[depth] for depth in sorted(found)]


def _fastest(depth: int, pipelines: int, costs: CostModel, *, split_backward: bool) -> FoundPlan | None:
    layouts: list[Layout] = []
    for recompute in (False, True):
        layers = (costs.workload.recomputed() if recompute else costs.workload).layers
        stages = split_layers([layer.total_s for layer in layers], depth)
        cut_points = tuple(stage.stop for stage in stages)
        least, left = divmod(costs.workload.micro_batches, pipelines)
        shares = [least + (number < left) for number in range(pipelines)]
        layouts.append(Layout(tuple((cut_points, share) for share in shares), recompute, math.nan))
    for split in (True, False) if split_backward else (False,):
        chosen = fastest_layout(f"{pipelines} x {depth}", layouts, costs, split_backward=split, current=None)
        if chosen is not None:
            return chosen.found
    return None
