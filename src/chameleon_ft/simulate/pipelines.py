"""Pipelines by class: those that are cut alike and whose workers are as fast take as long, and are looked at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Final

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.estimate import PipelineTimes, pipeline_bound_s, pipeline_times, program_memory, state_bytes
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route, split_layers
from chameleon_ft.schedule import CostModel, Program, best_program, default_limits, replay

__all__ = ["Cut", "PipelineClass", "PipelineRun", "Pipelines"]

# Operations that may be scheduled for a program; the first list schedule is always made.
_EFFORT: Final = 1_000
# Shares of up to so many micro-batches are scheduled; of larger ones, those at most an eighth apart.
_EACH: Final = 16


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """Where the stages of a pipeline stop, and whether its workers recompute."""

    stops: tuple[int, ...]
    recompute: bool = False

    @property
    def depth(self) -> int:
        """Number of stages."""
        return len(self.stops)

    @property
    def stages(self) -> tuple[LayerRange, ...]:
        """The layers of each stage."""
        return _stages(self.stops)


@cache
def _stages(stops: tuple[int, ...]) -> tuple[LayerRange, ...]:
    return tuple(LayerRange(start, stop) for start, stop in pairwise((0, *stops)))


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
        ends_s: the same of each stage.
    """

    program_s: float
    ends_s: tuple[float, ...]


class Pipelines:
    """Times of pipelines by class and share, each scheduled and replayed once.

    Stages lie on hosts as on an empty cluster, one after the other from the first worker of a host: a message crosses
    hosts after every `workers_per_host` stages. Programs are by `best_program`, so times are those of the runtime for a
    pipeline that lies so. Between two shares that are scheduled, up to an eighth apart, times are linear.
    """

    def __init__(self, costs: CostModel, *, split_backward: bool) -> None:
        self.costs = costs
        self.split_backward = split_backward
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
        self._runs: dict[tuple[PipelineClass, int], PipelineRun | None] = {}
        self._costs_of: dict[tuple[float, ...], CostModel] = {}
        self._times: dict[PipelineClass, PipelineTimes] = {}
        self._peaks: dict[PipelineClass, tuple[int, int]] = {}
        self._cuts: dict[int, tuple[Cut, ...]] = {}

    def cuts(self, depth: int) -> tuple[Cut, ...]:
        """The cut whose slowest stage is fastest, once with the longer stages late and once early."""
        if depth not in self._cuts:
            late = tuple(layers.stop for layers in split_layers(self._layer_s, depth))
            mirrored = split_layers(self._layer_s[::-1], depth)
            early = tuple(self.num_layers - layers.start for layers in reversed(mirrored))
            self._cuts[depth] = tuple(Cut(stops) for stops in dict.fromkeys((late, early)))
        return self._cuts[depth]

    def even_cut(self, depth: int) -> Cut:
        """The first of them."""
        return self.cuts(depth)[0]

    def stage_state_bytes(self, layers: LayerRange) -> int:
        """Parameters and optimizer state of a stage."""
        return sum(self._state[layers.start : layers.stop])

    def layer_state_bytes(self, layer: int) -> int:
        """The same of a layer."""
        return self._state[layer]

    def held_bytes(self, layers: LayerRange) -> int:
        """What a worker holds of a stage between two steps."""
        return self.stage_state_bytes(layers) + sum(self._gradient[layers.start : layers.stop])

    def bound_s(self, own: PipelineClass, micro_batches: int) -> float:
        """Seconds that no order of operations can beat."""
        if own not in self._times:
            hops = _hops(own.cut)
            recompute = frozenset(range(own.cut.depth)) if own.cut.recompute else frozenset()
            self._times[own] = pipeline_times(
                hops, self._costs(own), split_backward=self.split_backward, recompute=recompute
            )
        return pipeline_bound_s(self._times[own], micro_batches)

    def run(self, own: PipelineClass, micro_batches: int) -> PipelineRun | None:
        """How long it takes; None where it does not fit the memory."""
        key = own, micro_batches
        if key not in self._runs:
            low, high = _knots(micro_batches)
            if low == high:
                self._runs[key] = self._scheduled(own, micro_batches)
            else:
                self._runs[key] = _between(
                    self.run(own, low), self.run(own, high), (micro_batches - low) / (high - low)
                )
        return self._runs[key]

    def program_s(self, own: PipelineClass, micro_batches: int) -> float:
        """The seconds of `run`, infinite where it does not fit; 0 for no micro-batches."""
        if micro_batches < 1:
            return 0.0
        run = self.run(own, micro_batches)
        return math.inf if run is None else run.program_s

    def fitting(self, own: PipelineClass, micro_batches: int) -> PipelineClass | None:
        """The class itself, or the same with recomputation where that is needed to fit; None where nothing does."""
        for recompute in (own.cut.recompute, True):
            changed = replace(own, cut=replace(own.cut, recompute=recompute))
            if self.run(changed, micro_batches) is not None:
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

    def _scheduled(self, own: PipelineClass, micro_batches: int) -> PipelineRun | None:
        hops, costs = _hops(own.cut), self._costs(own)
        plan = Plan(
            Placement(self.num_layers, {hop.worker: (hop.layers,) for hop in hops}),
            tuple(Route(number, hops) for number in range(micro_batches)),
            self.split_backward,
            frozenset(range(len(hops))) if own.cut.recompute else frozenset(),
        )
        for ceiling in (None, default_limits(plan)):
            program = best_program(plan, costs, ceiling=ceiling, effort=_EFFORT).program
            if self._fits(own, micro_batches, plan, program):
                timeline = replay(program, costs)
                ends_s = {timed.worker: timed.end_s for timed in timeline.operations}
                return PipelineRun(timeline.step_s, tuple(ends_s[hop.worker] for hop in hops))
        return None

    def _fits(self, own: PipelineClass, micro_batches: int, plan: Plan, program: Program) -> bool:
        """Whether every worker has room; where fewer micro-batches needed little, that is not looked at again.

        What a worker holds grows with its micro-batches, but by no larger share than these do.
        """
        if self.memory_bytes is None:
            return True
        if own in self._peaks:
            known, peak = self._peaks[own]
            if peak * max(1.0, micro_batches / known) <= self.memory_bytes:
                return True
        needed = program_memory(program, plan.placement, self.costs.workload)
        peak = max(each.peak_bytes for each in needed.values())
        if peak > self.memory_bytes:
            return False
        self._peaks[own] = max(self._peaks.get(own, (0, 0)), (micro_batches, peak))
        return True


def _knots(micro_batches: int) -> tuple[int, int]:
    """The shares around it that are scheduled; twice itself if it is one."""
    if micro_batches <= _EACH:
        return micro_batches, micro_batches
    apart = 2 ** ((micro_batches // _EACH).bit_length())
    low = micro_batches // apart * apart
    return (low, low) if low == micro_batches else (low, low + apart)


def _between(low: PipelineRun | None, high: PipelineRun | None, part: float) -> PipelineRun | None:
    if low is None or high is None:
        return None

    def at(first_s: float, last_s: float) -> float:
        return first_s + part * max(0.0, last_s - first_s)

    return PipelineRun(at(low.program_s, high.program_s), tuple(map(at, low.ends_s, high.ends_s)))


def _hops(cut: Cut) -> tuple[Hop, ...]:
    return tuple(Hop(worker, layers) for worker, layers in enumerate(cut.stages))


def uniform(speeds: Sequence[float]) -> tuple[float, ...]:
    """The speeds of a class: none where all are 1."""
    return () if all(speed == 1.0 for speed in speeds) else tuple(speeds)
