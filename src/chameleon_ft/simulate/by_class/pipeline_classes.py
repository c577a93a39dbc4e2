"""Pipelines by class: those that are cut alike and whose workers are as fast take as long, and are looked at once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Final

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.estimate import PipelineTimes, estimate_parts, pipeline_bound_s, pipeline_times, state_bytes
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route, split_layers
from chameleon_ft.presets import Recompute
from chameleon_ft.recovery import uniform_limits
from chameleon_ft.schedule import CostModel, InFlightLimit, default_limits
from chameleon_ft.schedule.best import best_parts, step_s_of

__all__ = ["Cut", "PipelineClass", "PipelineRun", "Pipelines", "first_fitting", "limit_levels", "recomputed_layers"]

# Operations that may be scheduled for a program; the first list schedule is always made.
_EFFORT: Final = 1_000
# Shares of up to this many micro-batches are scheduled; of larger ones, those an eighth apart.
_EACH: Final = 16
# Beyond twice this many micro-batches, or the depth if that is more, a pipeline is in its steady state.
_STEADY: Final = 32


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """Where the stages of a pipeline stop, and how its workers recompute, each all of its layers."""

    cut_points: tuple[int, ...]
    recompute: Recompute = Recompute.NONE

    @property
    def depth(self) -> int:
        """Number of stages."""
        return len(self.cut_points)

    @property
    def stages(self) -> tuple[LayerRange, ...]:
        """The layers of each stage."""
        return _stages(self.cut_points)


@cache
def _stages(cut_points: tuple[int, ...]) -> tuple[LayerRange, ...]:
    return tuple(LayerRange(start, stop) for start, stop in pairwise((0, *cut_points)))


@dataclass(frozen=True, slots=True, order=True)
class PipelineClass:
    """A cut on workers of these speeds, one for each stage; no speeds means that all are 1."""

    cut: Cut
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One pipeline with its share of the micro-batches.

    Attributes:
        program_s: seconds until its last operation has ended.
        ends_s: seconds until the last operation of each stage has ended.
        peak_bytes: bytes that the worker that needs most holds at its worst moment.
    """

    program_s: float
    ends_s: tuple[float, ...]
    peak_bytes: float


class Pipelines:
    """Times of pipelines by class and share, each scheduled and replayed once.

    Stages lie on hosts as on an empty cluster, one after the other from the first worker of a host: a message crosses
    hosts after every `workers_per_host` stages. Programs are by `best_program`, so times are those of the runtime for a
    pipeline that lies so. Between two shares that are scheduled, up to an eighth apart, times and memory are linear; in
    the steady state they grow as they do between two shares in it. If they are redundant, every stage has the state of
    its successor as well, the last one that of the first.
    """

    def __init__(self, costs: CostModel, *, split_backward: bool, redundant: bool = False) -> None:
        self.costs = costs
        self.split_backward = split_backward
        self._redundant = redundant
        self.num_layers = len(costs.workload.layers)
        self._layer_s = [layer.forward_s + layer.backward_s for layer in costs.workload.layers]
        workers = costs.cluster.workers
        hosts: dict[str, int] = {}
        for worker in workers:
            hosts[worker.host] = hosts.get(worker.host, 0) + 1
        self.per_host = max(hosts.values())
        known = [worker.memory_bytes for worker in workers if worker.memory_bytes is not None]
        self.memory_bytes = min(known) if len(known) == len(workers) else None
        self._state = [state_bytes(layer) for layer in costs.workload.layers]
        self._gradient = [layer.gradient_bytes for layer in costs.workload.layers]
        self._held = _sums(map(sum, zip(self._state, self._gradient, strict=True)))
        workload = costs.workload
        self._has_selective = any(layer.selective_bytes is not None for layer in workload.layers)
        self._activations = {
            Recompute.NONE: _sums(layer.activation_bytes for layer in workload.layers),
            Recompute.SELECTIVE: _sums(workload.selective_bytes),
            Recompute.FULL: _sums(layer.activation_bytes for layer in workload.recomputed().layers),
        }
        self._runs: dict[tuple[PipelineClass, int], PipelineRun | None] = {}
        self._scheduled: dict[tuple[PipelineClass, int, int], PipelineRun] = {}
        self._costs_of: dict[tuple[float, ...], CostModel] = {}
        self._times: dict[PipelineClass, PipelineTimes] = {}
        self._cuts: dict[int, tuple[Cut, ...]] = {}

    def cuts(self, depth: int) -> tuple[Cut, ...]:
        """The cuts whose slowest stage is fastest, with longer stages late and early; then the one of least memory."""
        if depth not in self._cuts:
            late = tuple(layers.stop for layers in split_layers(self._layer_s, depth))
            mirrored = split_layers(self._layer_s[::-1], depth)
            early = tuple(self.num_layers - layers.start for layers in reversed(mirrored))
            self._cuts[depth] = tuple(
                Cut(cut_points) for cut_points in dict.fromkeys((late, early, self._least_memory_cut(depth)))
            )
        return self._cuts[depth]

    def _least_memory_cut(self, depth: int) -> tuple[int, ...]:
        """The cut whose largest stage is smallest, with recomputation and as many in flight as 1F1B has."""
        low, high = 0, self._least_stage_bytes(0, self.num_layers, depth, Recompute.FULL)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._filled(depth, middle) else (middle, high)
        return self._filled(depth, high) or ()

    def _filled(self, depth: int, capacity: int) -> tuple[int, ...]:
        """Where stages end that hold as many layers as they can, early ones with the most in flight; () if too many."""
        cut_points: list[int] = []
        start = 0
        for in_flight in range(depth, 0, -1):
            stop = start
            most = self.num_layers - in_flight + 1
            while stop < most and self._least_stage_bytes(start, stop + 1, in_flight, Recompute.FULL) <= capacity:
                stop += 1
            if stop == start:
                return ()
            cut_points.append(stop)
            start = stop
        return tuple(cut_points) if start == self.num_layers else ()

    def even_cut(self, depth: int) -> Cut:
        """The first of them."""
        return self.cuts(depth)[0]

    def layer_state_bytes(self, layer: int) -> int:
        """Parameters and optimizer state of a layer."""
        return self._state[layer]

    def held_bytes(self, layers: LayerRange) -> int:
        """What a worker holds of a stage between two steps."""
        return self._held[layers.stop] - self._held[layers.start]

    def bound_s(self, own: PipelineClass, micro_batches: int) -> float:
        """Seconds that no order of operations can beat."""
        if own not in self._times:
            hops = _hops(own.cut)
            self._times[own] = pipeline_times(
                hops, self._costs(own), split_backward=self.split_backward, recompute=recomputed_layers(own.cut, hops)
            )
        return pipeline_bound_s(self._times[own], micro_batches)

    def run(self, own: PipelineClass, micro_batches: int) -> PipelineRun | None:
        """The fastest run that fits the memory; None if not even the one with as few in flight as 1F1B fits."""
        key = own, micro_batches
        if key not in self._runs:
            self._runs[key] = self._fitting_run(own, micro_batches)
        return self._runs[key]

    def _fitting_run(self, own: PipelineClass, micro_batches: int) -> PipelineRun | None:
        if not self.fits(own, micro_batches):
            return None
        looser = len(limit_levels(self._plan(own, 1))) - 1
        level = first_fitting(looser, lambda each: self._fits_under(own, micro_batches, each))
        return self._run(own, micro_batches, -1 if level is None else level)

    def fits(self, own: PipelineClass, micro_batches: int) -> bool:
        """Whether the memory holds it with as few micro-batches in flight as 1F1B has."""
        if self.memory_bytes is not None and self._least_bytes(own, micro_batches) > self.memory_bytes:
            return False
        return self._fits_under(own, micro_batches, -1)

    def _fits_under(self, own: PipelineClass, micro_batches: int, level: int) -> bool:
        return self.memory_bytes is None or self._run(own, micro_batches, level).peak_bytes <= self.memory_bytes

    def line(self, own: PipelineClass, micro_batches: int) -> tuple[float, float] | None:
        """(start_s, period_s): a share near `micro_batches` takes about start_s + share * period_s; None if none fits.

        The period is at least what one more micro-batch adds to the lower bound, however good the two programs are.
        """
        one, two = self.run(own, micro_batches), self.run(own, micro_batches + 1)
        if one is None:
            return None
        period_s = self.bound_s(own, micro_batches + 1) - self.bound_s(own, micro_batches)
        if two is not None:
            period_s = max(period_s, two.program_s - one.program_s)
        return one.program_s - micro_batches * period_s, period_s

    def program_s(self, own: PipelineClass, micro_batches: int) -> float:
        """The seconds of `run`, infinite where it does not fit; 0 for no micro-batches."""
        if micro_batches < 1:
            return 0.0
        run = self.run(own, micro_batches)
        return math.inf if run is None else run.program_s

    def fitting(self, own: PipelineClass, micro_batches: int) -> PipelineClass | None:
        """The class itself, or with as much recomputation as it takes to fit; None if none does."""
        levels = [level for level in Recompute if level is not Recompute.SELECTIVE or self._has_selective]
        for recompute in levels[levels.index(own.cut.recompute) :]:
            changed = replace(own, cut=replace(own.cut, recompute=recompute))
            if self.fits(changed, micro_batches):
                return changed
        return None

    def _costs(self, own: PipelineClass) -> CostModel:
        depth = own.cut.depth
        speeds = own.speeds or (1.0,) * depth
        if speeds not in self._costs_of:
            workers = tuple(
                Worker(number, f"host{number // self.per_host}", speed, self.memory_bytes)
                for number, speed in enumerate(speeds)
            )
            cluster = self.costs.cluster
            self._costs_of[speeds] = CostModel(
                self.costs.workload, Cluster(workers, cluster.intra_host, cluster.inter_host)
            )
        return self._costs_of[speeds]

    def _run(self, own: PipelineClass, micro_batches: int, level: int) -> PipelineRun:
        low, high = _knots(micro_batches, own.cut.depth)
        first = self._schedule(own, low, level)
        if low == high:
            return first
        period_s = self.bound_s(own, low + 1) - self.bound_s(own, low)
        last = self._schedule(own, high, level)
        return _on_line(first, last, (micro_batches - low) / (high - low), least_s=period_s * (high - low))

    def _schedule(self, own: PipelineClass, micro_batches: int, level: int) -> PipelineRun:
        """The run by `best_program` under one of the `limit_levels`."""
        key = own, micro_batches, level
        if key not in self._scheduled:
            plan, costs = self._plan(own, micro_batches), self._costs(own)
            parts = best_parts(plan, costs, in_flight_limits=limit_levels(plan)[level], effort=_EFFORT)
            ends_s = dict(zip(parts[0].component.workers, parts[0].schedule.last_s, strict=True))
            self._scheduled[key] = PipelineRun(
                program_s=step_s_of(parts),
                ends_s=tuple(ends_s[worker] for worker in range(own.cut.depth)),
                peak_bytes=max(
                    peak + self._spare_state(own.cut, worker)
                    for worker, peak in estimate_parts(plan, parts, costs).peak_bytes.items()
                ),
            )
        return self._scheduled[key]

    def _plan(self, own: PipelineClass, micro_batches: int) -> Plan:
        hops = _hops(own.cut)
        return Plan(
            Placement(self.num_layers, {hop.worker: (hop.layers,) for hop in hops}),
            tuple(Route(number, hops) for number in range(micro_batches)),
            self.split_backward,
            recomputed_layers(own.cut, hops),
        )

    def _least_bytes(self, own: PipelineClass, micro_batches: int) -> int:
        """Bytes below which no run of 1F1B's order is: state, and the activations in flight when warm-up ends."""
        return max(
            self._least_stage_bytes(
                stage.start, stage.stop, min(micro_batches, own.cut.depth - number), own.cut.recompute
            )
            + self._spare_state(own.cut, number)
            for number, stage in enumerate(own.cut.stages)
        )

    def _spare_state(self, cut: Cut, stage: int) -> int:
        """Bytes of its successor's state that a stage has."""
        if not self._redundant or cut.depth == 1:
            return 0
        return sum(map(self.layer_state_bytes, cut.stages[(stage + 1) % cut.depth]))

    def _least_stage_bytes(self, start: int, stop: int, in_flight: int, recompute: Recompute) -> int:
        activations = self._activations[recompute]
        state = self._held[stop] - self._held[start]
        return state + in_flight * (activations[stop] - activations[start])


def limit_levels(plan: Plan) -> list[Mapping[int, InFlightLimit]]:
    """Limits of what workers keep, none first, each of which needs no more memory than the one before.

    After none come equal limits for all workers, below two pipeline depths, then those of ZB-H1, then those of 1F1B.
    """
    depth = max(len(route.hops) for route in plan.routes)
    equal = [uniform_limits(plan.workers, most) for most in range(2 * depth - 1, depth - 1, -1)]
    least = default_limits(plan)
    few = {worker: InFlightLimit(limit.in_flight, limit.in_flight) for worker, limit in least.items()}
    return [{}, *equal, least, few]


def first_fitting(count: int, fits: Callable[[int], bool]) -> int | None:
    """The least of 0, 1, ... below `count` that fits, if all after it fit as well; None if none does."""
    if fits(0):
        return 0
    found = 1 + bisect_left(range(1, count), True, key=fits)
    return found if found < count else None


def _sums(amounts: Iterable[int]) -> list[int]:
    """Sums of the first n, for each n."""
    return list(accumulate(amounts, initial=0))


def _knots(micro_batches: int, depth: int) -> tuple[int, int]:
    """The two shares that are scheduled for a share; twice the share itself if it is scheduled."""
    if micro_batches <= _EACH:
        return micro_batches, micro_batches
    steady = 2 ** (max(depth, _STEADY) - 1).bit_length()
    if micro_batches > 2 * steady:
        return steady, 2 * steady
    apart = 2 ** ((micro_batches // _EACH).bit_length())
    low = micro_batches // apart * apart
    return (low, low) if low == micro_batches else (low, low + apart)


def _on_line(low: PipelineRun, high: PipelineRun, part: float, *, least_s: float) -> PipelineRun:
    """The run at `part` of the way from `low` to `high`, or beyond it; they are at least `least_s` apart."""
    rise_s = max(least_s, high.program_s - low.program_s)
    return PipelineRun(
        program_s=low.program_s + part * rise_s,
        ends_s=tuple(end_s + part * rise_s for end_s in low.ends_s),
        peak_bytes=low.peak_bytes + part * max(0.0, high.peak_bytes - low.peak_bytes),
    )


def _hops(cut: Cut) -> tuple[Hop, ...]:
    return tuple(Hop(worker, layers) for worker, layers in enumerate(cut.stages))


def recomputed_layers(cut: Cut, hops: Sequence[Hop]) -> dict[int, RecomputedLayers]:
    """Layers that each worker recomputes, as in `Plan.recompute`."""
    if cut.recompute is Recompute.NONE:
        return {}
    selective = cut.recompute is Recompute.SELECTIVE
    return {
        hop.worker: RecomputedLayers(hop.layers.start, hop.layers.stop, len(hop.layers) if selective else 0)
        for hop in hops
    }


def uniform(speeds: Sequence[float]) -> tuple[float, ...]:
    """The speeds of a class: none where all are 1."""
    return () if all(speed == 1.0 for speed in speeds) else tuple(speeds)
