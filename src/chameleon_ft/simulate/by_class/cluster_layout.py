"""Plans of thousands of workers: pipelines by what they hold, with gaps where workers were lost.

Holders of layers are arrays. What moves between two layouts is computed from these.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.cluster import Worker
from chameleon_ft.cost.presets import Recompute
from chameleon_ft.cost.step import PartsEstimate, estimate_parts
from chameleon_ft.errors import NoHolderError, PlanError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.simulate.by_class.pipeline_classes import (
    Cut,
    PipelineClass,
    Pipelines,
    first_fitting,
    limit_levels,
    on_workers,
    recomputed_layers,
)
from chameleon_ft.simulate.by_class.step_times import ClassStep, StepTimes

# By pipeline: its cut, and (host, speed) of each worker; None for a gap. Hosts are numbered as they come.
_Key: TypeAlias = tuple[tuple[Cut, tuple[tuple[int, float] | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class LayoutPipeline:
    """A pipeline on workers, stage by stage; None where the worker of a stage is lost."""

    cut: Cut
    workers: tuple[int | None, ...]

    @property
    def whole(self) -> bool:
        """Whether no worker is lost."""
        return None not in self.workers

    @property
    def live(self) -> tuple[int, ...]:
        """The workers that are left."""
        return tuple(worker for worker in self.workers if worker is not None)


@dataclass(frozen=True, slots=True)
class Places:
    """The workers of a layout and their stages as arrays, an element for each worker.

    Attributes:
        workers: their numbers.
        starts, stops: the layers `start, ..., stop - 1` of each.
        depths: stages of the pipeline of each.
    """

    workers: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    depths: NDArray[np.int64]

    def holders(self, num_layers: int) -> NDArray[np.int64]:
        """Return how many workers hold each layer."""
        return count_layers(self.starts, self.stops, num_layers)


def count_layers(starts: NDArray[np.int64], stops: NDArray[np.int64], num_layers: int) -> NDArray[np.int64]:
    """Return in how many of the ranges `start, ..., stop - 1` each layer is."""
    begun, ended = (np.bincount(ends, minlength=num_layers + 1) for ends in (starts, stops))
    return np.cumsum(begun - ended)[:num_layers]


@cache
def _stage_table(cut_points: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the start, the stop and the number of all stages of a pipeline, by stage; of shape (3, stages)."""
    return np.array([(0, *cut_points[:-1]), cut_points, (len(cut_points),) * len(cut_points)], dtype=np.int64)


@dataclass(frozen=True)
class ClusterLayout:
    """Pipelines side by side. Shares of the micro-batches are no part of it: they change with every change."""

    pipelines: tuple[LayoutPipeline, ...]

    @cached_property
    def used(self) -> frozenset[int]:
        """The workers of all pipelines."""
        return frozenset(self.places.workers.tolist())

    @cached_property
    def places(self) -> Places:
        """The workers and their stages as arrays."""
        if not self.pipelines:
            return Places(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        workers = np.array(
            [-1 if worker is None else worker for own in self.pipelines for worker in own.workers], dtype=np.int64
        )
        live = workers >= 0
        starts, stops, depths = np.concatenate([_stage_table(own.cut.cut_points) for own in self.pipelines], axis=1)
        return Places(workers[live], starts[live], stops[live], depths[live])

    def without(self, lost: Collection[int]) -> ClusterLayout:
        """Return the layout with gaps in place of these workers."""
        if self.used.isdisjoint(lost):
            return self
        gone = set(lost)
        return ClusterLayout(
            tuple(
                pipeline
                if gone.isdisjoint(pipeline.workers)
                else LayoutPipeline(pipeline.cut, tuple(None if each in gone else each for each in pipeline.workers))
                for pipeline in self.pipelines
            )
        )

    @property
    def has_gaps(self) -> bool:
        """Whether any pipeline lacks a worker."""
        return not all(pipeline.whole for pipeline in self.pipelines)

    @cached_property
    def held(self) -> Mapping[int, LayerRange]:
        """The layers of each worker."""
        return {
            worker: layers
            for pipeline in self.pipelines
            for worker, layers in zip(pipeline.workers, pipeline.cut.stages, strict=True)
            if worker is not None
        }


def arranged(wanted: Mapping[Cut, int], workers: Sequence[int], current: ClusterLayout | None = None) -> ClusterLayout:
    """Return this many pipelines of each cut on these workers; whole ones of `current` that are wanted stay.

    The other pipelines are formed of the remaining workers, neighbours by number together so that they share hosts.
    Within a pipeline, stages go to workers in the order of the layers that they hold.
    """
    free = set(workers)
    left = dict(wanted)
    pipelines: list[LayoutPipeline] = []
    held: Mapping[int, LayerRange] = {}
    if current is not None:
        held = current.held
        for pipeline in current.pipelines:
            if left.get(pipeline.cut, 0) and free.issuperset(pipeline.workers):
                left[pipeline.cut] -= 1
                free.difference_update(pipeline.live)
                pipelines.append(pipeline)
    pool = iter(sorted(free))
    for cut, count in sorted(left.items(), key=lambda item: (-item[0].depth, item[0])):
        for _ in range(count):
            own = list(itertools.islice(pool, cut.depth))
            own.sort(key=lambda worker: held[worker].start if worker in held else math.inf)
            pipelines.append(LayoutPipeline(cut, tuple(own)))
    return ClusterLayout(tuple(pipelines))


def by_stage(layout: ClusterLayout) -> ClusterLayout:
    """Return the pipelines with neighbouring workers in equal stages: gradients cross hosts less, activations more."""
    stages = sorted(
        (stage / pipeline.cut.depth, number, stage)
        for number, pipeline in enumerate(layout.pipelines)
        for stage in range(pipeline.cut.depth)
    )
    # A pipeline gets its workers in the order of its stages.
    workers: dict[int, list[int]] = defaultdict(list)
    for worker, (_, number, _) in zip(sorted(layout.used), stages, strict=True):
        workers[number].append(worker)
    return ClusterLayout(
        tuple(LayoutPipeline(pipeline.cut, tuple(workers[number])) for number, pipeline in enumerate(layout.pipelines))
    )


def layout_of_plan(plan: Plan) -> ClusterLayout:
    """Return the pipelines of a plan. Raises PlanError if micro-batches make detours, so that there are none."""
    pipelines = dict.fromkeys(route.hops for route in plan.routes)
    workers = [hop.worker for hops in pipelines for hop in hops]
    if len(set(workers)) < len(workers):
        raise PlanError("the plan has detours; begin with a plan of pipelines side by side")
    return ClusterLayout(
        tuple(
            LayoutPipeline(
                Cut(tuple(hop.layers.stop for hop in hops), _max_recomputation(plan, hops)),
                tuple(hop.worker for hop in hops),
            )
            for hops in pipelines
        )
    )


def _max_recomputation(plan: Plan, hops: Sequence[Hop]) -> Recompute:
    """Return how the workers of a pipeline that recompute most do so."""
    own = [plan.recompute[hop.worker] for hop in hops if hop.worker in plan.recompute]
    if any(layers.full for layers in own):
        return Recompute.FULL
    return Recompute.SELECTIVE if own else Recompute.NONE


def plan_of_layout(layout: ClusterLayout, times: StepTimes) -> Plan | None:
    """Return the plan of a layout without gaps, on workers of speed 1; None if it does not fit the memory."""
    step = times.step(Counter(PipelineClass(pipeline.cut) for pipeline in layout.pipelines))
    if step is None:
        return None
    shares = [step.most.get(PipelineClass(pipeline.cut), 0) for pipeline in layout.pipelines]
    surplus = sum(shares) - times.micro_batches
    held: dict[int, tuple[LayerRange, ...]] = {}
    recompute: dict[int, RecomputedLayers] = {}
    routes: list[Route] = []
    for pipeline, most in zip(layout.pipelines, shares, strict=True):
        share = most - 1 if most and surplus > 0 else most
        surplus -= most - share
        if share:
            hops = tuple(map(Hop, pipeline.live, pipeline.cut.stages))
            held.update((hop.worker, (hop.layers,)) for hop in hops)
            recompute.update(recomputed_layers(pipeline.cut, hops))
            routes += [Route(number, hops) for number in range(len(routes), len(routes) + share)]
    placement = Placement(times.pipelines.num_layers, held)
    return Plan(placement, tuple(routes), times.pipelines.split_backward, recompute)


def layout_step(layout: ClusterLayout, times: StepTimes, speeds: Mapping[int, float]) -> ClassStep | None:
    """Return the step of a layout; None if it does not fit the memory or a layer has no holder.

    In a layout with gaps, micro-batches make detours. The holders of a layer that g pipelines lack do the work of all
    pipelines. With g the most gaps of any layer, a step takes at least as long as with g pipelines fewer, and that is
    the time assumed here; `search.reroute` comes near to it if there are many pipelines. Detours cut hops between
    layers, so if all pipelines are alike, shares need not be whole: they are multiples of one over the layers of the
    shortest stage.
    """
    slow = {worker for worker, speed in speeds.items() if speed != 1.0}
    whole: Counter[PipelineClass] = Counter()
    broken: Counter[PipelineClass] = Counter()
    # Lost holders of each layer.
    gaps: Counter[int] = Counter()
    for pipeline in layout.pipelines:
        own = PipelineClass(pipeline.cut)
        if slow and not slow.isdisjoint(pipeline.workers):
            own = replace(own, speeds=tuple(1.0 if worker is None else speeds[worker] for worker in pipeline.workers))
        if pipeline.whole:
            whole[own] += 1
        elif pipeline.live:
            broken[own] += 1
            for worker, layers in zip(pipeline.workers, pipeline.cut.stages, strict=True):
                if worker is None:
                    gaps.update(layers)
    if broken:
        kept = broken.total() - max(gaps.values())
        if not whole and not kept:
            return None
        for own, count in broken.most_common():
            taken = min(count, kept)
            whole[own] += taken
            kept -= taken
    step = times.step(whole)
    if step is None or len(whole) > 1 or not layout.has_gaps:
        return step
    ((own, count),) = whole.items()
    pieces = min(map(len, own.cut.stages))
    share, part = divmod(math.ceil(times.micro_batches * pieces / count), pieces)
    if not part or not share:
        return step
    low_s, high_s = (times.pipelines.program_s(own, each) for each in (share, share + 1))
    program_s = low_s + (high_s - low_s) * part / pieces
    return replace(step, step_s=step.step_s - step.program_s + program_s, program_s=program_s)


def fitting_estimate(plan: Plan, costs: CostModel) -> tuple[Mapping[int, InFlightLimit], PartsEstimate] | None:
    """Return (limits, estimate) with the most in flight of all `limit_levels` that fit; None if none fits."""
    levels = limit_levels(plan)

    @cache
    def estimate(level: int) -> PartsEstimate:
        return estimate_parts(plan, best_parts(plan, costs, in_flight_limits=levels[level]), costs)

    level = first_fitting(len(levels), lambda each: not estimate(each).over_capacity(costs))
    return None if level is None else (levels[level], estimate(level))


class ReplayedSteps:
    """Seconds of steps of layouts; layouts that differ only in the numbers of workers and hosts are replayed once."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._hosts = times.pipelines.costs.cluster.hosts
        self._replayed_s = cache(self._estimated_s)

    def step_s(self, layout: ClusterLayout, speeds: Mapping[int, float]) -> float | None:
        """Return seconds of a step with its detours; None if it does not fit, or a layer has no holder."""
        numbers: dict[str, int] = {}

        def place(worker: int) -> tuple[int, float]:
            return numbers.setdefault(self._hosts[worker], len(numbers)), speeds[worker]

        return self._replayed_s(
            tuple(
                (pipeline.cut, tuple(None if worker is None else place(worker) for worker in pipeline.workers))
                for pipeline in layout.pipelines
            )
        )

    def _estimated_s(self, key: _Key) -> float | None:
        ids = itertools.count()
        layout = ClusterLayout(tuple(LayoutPipeline(cut, tuple(itertools.islice(ids, cut.depth))) for cut, _ in key))
        places = [place for _, own in key for place in own]
        memory_bytes = self._times.pipelines.memory_bytes
        workers = [
            Worker(number, f"host{place[0]}", place[1], memory_bytes)
            for number, place in enumerate(places)
            if place is not None
        ]
        lost = [number for number, place in enumerate(places) if place is None]
        plan = plan_of_layout(layout, self._times)
        if plan is None or not set(plan.workers).difference(lost):
            return None
        costs = on_workers(self._times.pipelines.costs, workers)
        try:
            plan = reroute(plan, lost, costs) if lost else plan
        except NoHolderError:
            return None
        found = fitting_estimate(plan, costs)
        return None if found is None else found[1].step_s


def layer_rings(layout: ClusterLayout, numbers: NDArray[np.int64], num_layers: int) -> list[NDArray[np.int64]] | None:
    """Return the different sets of workers that hold some layer, as `LossRisk.of_rings` takes them.

    Args:
        layout: gaps are allowed.
        numbers: The number of the host of each worker.
        num_layers: The layers of the model.

    Returns:
        Arrays of workers; None if some layer has no holder.
    """
    places = layout.places
    order = np.lexsort((places.workers, numbers[places.workers]))
    # Neighbouring layers mostly belong to the same stages.
    codes, stage_of = np.unique((places.starts * (num_layers + 1) + places.stops)[order], return_inverse=True)
    starts, stops = np.divmod(codes, num_layers + 1)
    layers = np.arange(num_layers)[:, np.newaxis]
    # Of shape (layers, stages).
    holds = (starts <= layers) & (layers < stops)
    if not holds.any(axis=1).all():
        return None
    return [places.workers[order[own[stage_of]]] for own in np.unique(holds, axis=0)]


@dataclass(frozen=True, slots=True)
class Move:
    """The state that moves to a new layout.

    Attributes:
        moved_bytes: all that workers receive.
        transfer_s: seconds until it has arrived.
        max_bytes: the most that a worker of the layout before needs for what it receives, gradients included.
        max_idle_bytes: likewise for workers outside that layout.
    """

    moved_bytes: int = 0
    transfer_s: float = 0.0
    max_bytes: int = 0
    max_idle_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Lacked:
    """The layers that the workers of a new layout lack: those of each stage before and after the layers it has.

    Attributes:
        places: The workers of the new layout.
        starts, stops: `starts, ..., stops - 1` are the layers of the stage that the worker has.
        is_held: True if the worker held any layers.
        changes: True if it held others than those of its stage.
        before_bytes: what it held.
    """

    places: Places
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    is_held: NDArray[np.bool_]
    changes: NDArray[np.bool_]
    before_bytes: NDArray[np.int64]

    def bytes_of(self, table: NDArray[np.int64], depth_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes that each worker lacks.

        Args:
            table: bytes of all layers before each one, of shape (depths, layers + 1).
            depth_of: the row of each worker.
        """
        whole = table[depth_of, self.places.stops] - table[depth_of, self.places.starts]
        found: NDArray[np.int64] = whole - (table[depth_of, self.stops] - table[depth_of, self.starts])
        return found

    def workers_by_layer(self, of: NDArray[np.bool_], num_layers: int) -> NDArray[np.int64]:
        """Return how many of these workers lack each layer."""
        whole = count_layers(self.places.starts[of], self.places.stops[of], num_layers)
        return whole - count_layers(self.starts[of], self.stops[of], num_layers)


def move_to(new: ClusterLayout, current: ClusterLayout, pipelines: Pipelines) -> Move | None:
    """Return the state that moves to a new layout.

    The time is that of the worker that sends or receives most, at the bandwidth between hosts, which the sources and
    rounds of `chameleon_ft.transfer` reach but for a few messages. None if a layer has no holder, or the state that
    arrives does not fit beside the old.
    """
    lacked = _lacked(new.places, current.places, pipelines)
    depths, depth_of = np.unique(lacked.places.depths, return_inverse=True)
    own = [pipelines.state_bytes(depth) for depth in depths.tolist()]
    received = lacked.bytes_of(np.array([list(accumulate(each, initial=0)) for each in own]), depth_of)
    over = pipelines.memory_bytes is not None and lacked.before_bytes + received > pipelines.memory_bytes
    if np.any(over & lacked.changes):
        return None
    num_layers = pipelines.num_layers
    lacking = np.zeros(num_layers, dtype=np.int64)
    # The most bytes that a worker receives of each layer.
    sizes = np.zeros(num_layers, dtype=np.int64)
    for index, each in enumerate(own):
        lack = lacked.workers_by_layer(depth_of == index, num_layers)
        lacking += lack
        sizes = np.maximum(sizes, np.where(lack > 0, each, 0))
    if not lacking.any():
        return Move()
    holders = current.places.holders(num_layers)
    if np.any((lacking > 0) & (holders == 0)):
        return None
    sent = np.max(-(-lacking // np.maximum(holders, 1)) * sizes)
    beside = lacked.bytes_of(np.array([pipelines.held_before(depth) for depth in depths.tolist()]), depth_of)
    return Move(
        int(received.sum()),
        pipelines.costs.cluster.inter_host.message_s(int(max(received.max(), sent))),
        int(beside.max(initial=0, where=lacked.is_held)),
        int(beside.max(initial=0, where=~lacked.is_held)),
    )


def _lacked(new: Places, current: Places, pipelines: Pipelines) -> _Lacked:
    """Return what the workers of a new layout lack of their stages."""
    size = 1 + max(new.workers.max(initial=0), current.workers.max(initial=0))
    starts, stops, held_bytes = (np.zeros(size, dtype=np.int64) for _ in range(3))
    starts[current.workers], stops[current.workers] = current.starts, current.stops
    for depth in np.unique(current.depths).tolist():
        held, of = np.array(pipelines.held_before(depth)), current.depths == depth
        held_bytes[current.workers[of]] = held[current.stops[of]] - held[current.starts[of]]
    had_start, had_stop = starts[new.workers], stops[new.workers]
    first, last = np.maximum(had_start, new.starts), np.minimum(had_stop, new.stops)
    return _Lacked(
        places=new,
        starts=np.where(first < last, first, new.starts),
        stops=np.where(first < last, last, new.starts),
        is_held=had_stop > 0,
        changes=(had_start != new.starts) | (had_stop != new.stops),
        before_bytes=held_bytes[new.workers],
    )
