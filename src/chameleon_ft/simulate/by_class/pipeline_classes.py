"""Times of pipelines by class: pipelines with equal cuts and equal speeds of their workers are scheduled once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Final

from chameleon_ft.cluster import Worker
from chameleon_ft.cost.memory import WorkloadMemory
from chameleon_ft.cost.presets import Recompute
from chameleon_ft.cost.step import estimate_parts, pipeline_bound_s
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.plan import Hop, LayerRange, PipelineLayout, Plan, RecomputedLayers, pipelines_plan, split_layers
from chameleon_ft.plan.layouts import pipeline_hops
from chameleon_ft.recovery import uniform_limits
from chameleon_ft.schedule import CostModel, InFlightLimit, default_limits
from chameleon_ft.schedule.best import best_parts, step_s_of
from chameleon_ft.schedule.network import PipelineTimes, pipeline_times
from chameleon_ft.search.find import with_shares

# Most operations scheduled for a program; the first list schedule is always made.
_EFFORT: Final = 1_000
# Shares of up to this many micro-batches are all scheduled, larger ones an eighth apart.
_EACH: Final = 16
# Beyond twice this many micro-batches, or the depth if that is more, a pipeline is in its steady state.
_STEADY: Final = 32


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """The layer after each stage of a pipeline, and the recomputation of all its layers."""

    cut_points: tuple[int, ...]
    recompute: Recompute = Recompute.NONE
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Pipelines are counted by their cuts again and again.
        object.__setattr__(self, "_hash", hash((self.cut_points, self.recompute)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def depth(self) -> int:
        """Number of stages."""
        return len(self.cut_points)

    @property
    def stages(self) -> tuple[LayerRange, ...]:
        """Layers of each stage."""
        return _stages(self.cut_points)


@cache
def _stages(cut_points: tuple[int, ...]) -> tuple[LayerRange, ...]:
    return tuple(LayerRange(start, stop) for start, stop in pairwise((0, *cut_points)))


@dataclass(frozen=True, slots=True, order=True)
class PipelineClass:
    """A cut, and the speed of each stage's worker; no speeds if all are 1."""

    cut: Cut
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One pipeline with its share of the micro-batches.

    Attributes:
        program_s: seconds until its last operation ends.
        ends_s: seconds until the last operation of each stage ends.
        peak_bytes: peak memory of the worker that needs most.
    """

    program_s: float
    ends_s: tuple[float, ...]
    peak_bytes: float


class Pipelines:
    """Times of pipelines by class and share of the micro-batches, each scheduled and replayed once.

    Stages are placed as on an empty cluster, from the first worker of a host on: a message crosses hosts after every
    `per_host` stages. Programs come from `best_program`, so times are those of the runtime for this placement. Times
    and memory are linear between two scheduled shares, up to an eighth apart; in the steady state they continue the
    line through two shares.

    Args:
        costs: costs of the workload on all workers.
        split_backward: True if backward is split into I and W.
        redundant: True if every stage also holds the state of its successor, and the last stage that of the first.
    """

    def __init__(self, costs: CostModel, *, split_backward: bool, redundant: bool = False) -> None:
        self.costs = costs
        self.split_backward = split_backward
        workload, workers = costs.workload, costs.cluster.workers
        self.num_layers = len(workload.layers)
        self.per_host = max(Counter(worker.host for worker in workers).values())
        memories = [worker.memory_bytes for worker in workers if worker.memory_bytes is not None]
        self.memory_bytes = min(memories) if len(memories) == len(workers) else None
        self._redundant = redundant
        self._layer_s = workload.layer_times_s
        has_selective = any(layer.selective_bytes is not None for layer in workload.layers)
        self._recompute = [level for level in Recompute if level is not Recompute.SELECTIVE or has_selective]
        self._scheduled: dict[tuple[PipelineClass, int, int], PipelineRun] = {}
        self.run = cache(self._fitting_run)
        self.cuts = cache(self._cuts)
        self._costs_at = cache(self._costs_at_speeds)
        self._shared = cache(self._with_shares)
        self._memory = cache(lambda depth: WorkloadMemory(self._shared(depth).workload))
        self.state_bytes = cache(self._state_bytes)
        self._times = cache(self._pipeline_times)

    def _cuts(self, depth: int) -> tuple[Cut, ...]:
        """Return the cuts whose slowest stage is fastest, longer stages late or early, and the cut of least memory."""
        late = tuple(layers.stop for layers in split_layers(self._layer_s, depth))
        mirrored = split_layers(self._layer_s[::-1], depth)
        early = tuple(self.num_layers - layers.start for layers in reversed(mirrored))
        # The least size of the largest stage, with recomputation and the in-flight micro-batches of 1F1B.
        most = self._min_stage_bytes(depth, 0, self.num_layers, depth, Recompute.FULL)
        least = 1 + bisect_left(range(1, most), True, key=lambda size: bool(self._filled(depth, size)))
        return tuple(Cut(cut_points) for cut_points in dict.fromkeys((late, early, self._filled(depth, least))))

    def _filled(self, depth: int, stage_bytes: int) -> tuple[int, ...]:
        """Return the cut points of stages with as many layers as `stage_bytes` hold; () if layers are left over.

        Early stages have the most micro-batches in flight.
        """
        cut_points: list[int] = []
        start = 0
        for in_flight in range(depth, 0, -1):
            stop = start
            last = self.num_layers - in_flight + 1
            while (
                stop < last and self._min_stage_bytes(depth, start, stop + 1, in_flight, Recompute.FULL) <= stage_bytes
            ):
                stop += 1
            if stop == start:
                return ()
            cut_points.append(stop)
            start = stop
        return tuple(cut_points) if start == self.num_layers else ()

    def even_cut(self, depth: int) -> Cut:
        """Return the cut whose slowest stage is fastest, with longer stages late."""
        return self.cuts(depth)[0]

    def held_before(self, depth: int) -> list[int]:
        """Return for each layer the bytes that a worker of a pipeline of this depth holds of those before it."""
        return self._memory(depth).held_before

    def _with_shares(self, depth: int) -> CostModel:
        """Return the costs with the share of the optimizer's state that a worker of a pipeline of this depth owns.

        A layer has as many holders as there are pipelines of this depth, if all workers are in such pipelines.
        """
        workload = self.costs.workload
        holders = max(1, min(len(self.costs.cluster.workers) // depth, workload.micro_batches))
        return with_shares(self.costs, holders)

    def _state_bytes(self, depth: int) -> list[int]:
        """Return the bytes that a new holder of each layer receives in a pipeline of this depth."""
        return [state_bytes(layer) for layer in self._shared(depth).workload.layers]

    def bound_s(self, own: PipelineClass, micro_batches: int) -> float:
        """Return a lower bound, in seconds, on any order of operations."""
        return pipeline_bound_s(self._times(own), micro_batches)

    def _pipeline_times(self, own: PipelineClass) -> PipelineTimes:
        hops = pipeline_hops(range(own.cut.depth), own.cut.cut_points)
        return pipeline_times(
            hops, self._costs(own), split_backward=self.split_backward, recompute=recomputed_layers(own.cut, hops)
        )

    def _fitting_run(self, own: PipelineClass, micro_batches: int) -> PipelineRun | None:
        """Return the fastest run that fits the memory; None if not even those of 1F1B fit."""
        if not self.fits(own, micro_batches):
            return None
        looser = len(limit_levels(self._plan(own, 1))) - 1
        level = first_fitting(looser, lambda each: self._fits_under(own, micro_batches, each))
        return self._run(own, micro_batches, -1 if level is None else level)

    def fits(self, own: PipelineClass, micro_batches: int) -> bool:
        """Return whether the pipeline fits the memory with the in-flight micro-batches of 1F1B."""
        if self.memory_bytes is not None and self._min_bytes(own, micro_batches) > self.memory_bytes:
            return False
        return self._fits_under(own, micro_batches, -1)

    def _fits_under(self, own: PipelineClass, micro_batches: int, level: int) -> bool:
        return self.memory_bytes is None or self._run(own, micro_batches, level).peak_bytes <= self.memory_bytes

    def line(self, own: PipelineClass, micro_batches: int) -> tuple[float, float] | None:
        """Return (start_s, period_s): a share near `micro_batches` takes about start_s + share * period_s.

        The period is at least the increase of the lower bound with one more micro-batch, whatever the two programs.
        None if the share does not fit.
        """
        one, two = self.run(own, micro_batches), self.run(own, micro_batches + 1)
        if one is None:
            return None
        period_s = self.bound_s(own, micro_batches + 1) - self.bound_s(own, micro_batches)
        if two is not None:
            period_s = max(period_s, two.program_s - one.program_s)
        return one.program_s - micro_batches * period_s, period_s

    def program_s(self, own: PipelineClass, micro_batches: int) -> float:
        """Return the seconds of `run`; infinite if it does not fit, 0 for no micro-batches."""
        if micro_batches < 1:
            return 0.0
        run = self.run(own, micro_batches)
        return math.inf if run is None else run.program_s

    def fitting(self, own: PipelineClass, micro_batches: int) -> PipelineClass | None:
        """Return the class with the least additional recomputation with which it fits; None if it never fits."""
        for recompute in self._recompute[self._recompute.index(own.cut.recompute) :]:
            changed = replace(own, cut=replace(own.cut, recompute=recompute))
            if self.fits(changed, micro_batches):
                return changed
        return None

    def _costs(self, own: PipelineClass) -> CostModel:
        return self._costs_at(own.speeds or (1.0,) * own.cut.depth)

    def _costs_at_speeds(self, speeds: tuple[float, ...]) -> CostModel:
        """Return the costs on workers of these speeds, from the first worker of a host on."""
        places = [(f"host{number // self.per_host}", speed) for number, speed in enumerate(speeds)]
        workers = (Worker(number, *place, self.memory_bytes) for number, place in enumerate(places))
        return on_workers(self._shared(len(speeds)), workers)

    def _run(self, own: PipelineClass, micro_batches: int, level: int) -> PipelineRun:
        """Return the run under one of the `limit_levels`, scheduled or on the line through two scheduled runs."""
        low, high = _scheduled_shares(micro_batches, own.cut.depth)
        first = self._schedule(own, low, level)
        if low == high:
            return first
        last = self._schedule(own, high, level)
        period_s = self.bound_s(own, low + 1) - self.bound_s(own, low)
        rise_s = max(period_s * (high - low), last.program_s - first.program_s)
        part = (micro_batches - low) / (high - low)
        return PipelineRun(
            program_s=first.program_s + part * rise_s,
            ends_s=tuple(end_s + part * rise_s for end_s in first.ends_s),
            peak_bytes=first.peak_bytes + part * max(0.0, last.peak_bytes - first.peak_bytes),
        )

    def _schedule(self, own: PipelineClass, micro_batches: int, level: int) -> PipelineRun:
        """Return the run by `best_program` under one of the `limit_levels`."""
        key = own, micro_batches, level
        if key not in self._scheduled:
            plan, costs = self._plan(own, micro_batches), self._costs(own)
            parts = best_parts(plan, costs, in_flight_limits=limit_levels(plan)[level], effort=_EFFORT)
            ends_s = dict(zip(parts[0].component.workers, parts[0].schedule.last_s, strict=True))
            peak_bytes = estimate_parts(plan, parts, costs).peak_bytes
            self._scheduled[key] = PipelineRun(
                program_s=step_s_of(parts),
                ends_s=tuple(ends_s[worker] for worker in range(own.cut.depth)),
                peak_bytes=max(peak + self._redundant_bytes(own.cut, worker) for worker, peak in peak_bytes.items()),
            )
        return self._scheduled[key]

    def _plan(self, own: PipelineClass, micro_batches: int) -> Plan:
        layout = PipelineLayout(own.cut.cut_points, tuple(range(own.cut.depth)), micro_batches)
        recompute = recomputed_layers(own.cut, layout.hops)
        return pipelines_plan([layout], split_backward=self.split_backward, recompute=recompute)

    def _min_bytes(self, own: PipelineClass, micro_batches: int) -> int:
        """Return a lower bound of the memory of 1F1B: state, and the activations in flight when warm-up ends."""
        depth, recompute = own.cut.depth, own.cut.recompute
        return max(
            self._min_stage_bytes(depth, stage.start, stage.stop, min(micro_batches, depth - number), recompute)
            + self._redundant_bytes(own.cut, number)
            for number, stage in enumerate(own.cut.stages)
        )

    def _redundant_bytes(self, cut: Cut, stage: int) -> int:
        """Return the bytes of its successor's state that a stage holds."""
        if not self._redundant or cut.depth == 1:
            return 0
        sizes = self.state_bytes(cut.depth)
        return sum(sizes[layer] for layer in cut.stages[(stage + 1) % cut.depth])

    def _min_stage_bytes(self, depth: int, start: int, stop: int, in_flight: int, recompute: Recompute) -> int:
        return self._memory(depth).min_stage_bytes(start, stop, in_flight=in_flight, recompute=recompute)


def limit_levels(plan: Plan) -> list[Mapping[int, InFlightLimit]]:
    """Return limits of the micro-batches in flight, each needing no more memory than the one before.

    No limits, then equal limits for all workers, below two pipeline depths, then those of ZB-H1, then those of 1F1B.
    """
    depth = max(len(route.hops) for route in plan.routes)
    equal = [uniform_limits(plan.workers, most) for most in range(2 * depth - 1, depth - 1, -1)]
    least = default_limits(plan)
    few = {worker: InFlightLimit(limit.in_flight, limit.in_flight) for worker, limit in least.items()}
    return [{}, *equal, least, few]


def first_fitting(count: int, fits: Callable[[int], bool]) -> int | None:
    """Return the least number below `count` that fits, if all larger ones fit too; None if none fits.

    0 usually fits, so it is tried before the bisection.
    """
    if fits(0):
        return 0
    found = 1 + bisect_left(range(1, count), True, key=fits)
    return found if found < count else None


def on_workers(costs: CostModel, workers: Iterable[Worker]) -> CostModel:
    """Return the costs on other workers with the same links."""
    return replace(costs, cluster=replace(costs.cluster, workers=tuple(workers)))


def recomputed_layers(cut: Cut, hops: Sequence[Hop]) -> dict[int, RecomputedLayers]:
    """Return the layers that each worker recomputes, as in `Plan.recompute`."""
    if cut.recompute is Recompute.NONE:
        return {}
    selective = cut.recompute is Recompute.SELECTIVE
    return {
        hop.worker: RecomputedLayers(hop.layers.start, hop.layers.stop, len(hop.layers) if selective else 0)
        for hop in hops
    }


def _scheduled_shares(micro_batches: int, depth: int) -> tuple[int, int]:
    """Return the two scheduled shares whose line gives a share; twice the share itself if it is scheduled."""
    if micro_batches <= _EACH:
        return micro_batches, micro_batches
    steady = 2 ** (max(depth, _STEADY) - 1).bit_length()
    if micro_batches > 2 * steady:
        return steady, 2 * steady
    apart = 2 ** ((micro_batches // _EACH).bit_length())
    low = micro_batches // apart * apart
    return (low, low) if low == micro_batches else (low, low + apart)
