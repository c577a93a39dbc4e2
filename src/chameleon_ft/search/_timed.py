"""Pipelines with their programs: scheduled once for all that differ only in which worker is which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import eq
from typing import Final

from chameleon_ft.estimate.memory import stages_of
from chameleon_ft.estimate.pipeline_memory import pipeline_bytes
from chameleon_ft.plan import Hop, LayerRange, Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule._network import NetworkBuilder
from chameleon_ft.schedule._pipelines import PipelineSchedule, pipeline_schedule, rough_schedule
from chameleon_ft.schedule._records import Floats, Integers
from chameleon_ft.schedule._trials import ROUNDING
from chameleon_ft.search._bounds import Pipelines, Stops, SyncCost
from chameleon_ft.search._kinds import Crew, Shape
from chameleon_ft.search._reductions import Reduction

# Operations of a rough schedule for every hop of a micro-batch: F, I and W by four rules.
_ROUGH: Final = 12


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """A pipeline with a program.

    Attributes:
        shape: kinds of its workers.
        stops: where its stages stop.
        micro_batches: its share.
        recompute: whether its workers recompute.
        workers: some that it was scheduled on.
        schedule: what they run.
        ends_s: seconds until the last operation of each stage has ended; it makes gradients.
    """

    shape: Shape
    stops: Stops
    micro_batches: int
    recompute: bool
    workers: tuple[int, ...]
    schedule: PipelineSchedule
    ends_s: tuple[float, ...]

    @property
    def program_s(self) -> float:
        """Seconds until the last operation has ended."""
        return self.schedule.step_s


class Timer:
    """Schedules pipelines and remembers them; one that is longer than it must be by up to `slack` is good enough.

    Attributes:
        costs: what everything takes.
        crew: its workers by kind.
        pipelines: what pipelines can do at best.
        recomputing: the same for those that recompute; None where memory is no matter.
        host_numbers: the host of each worker, as a number.
        spent: the effort so far, in operations that might be scheduled.
        synced_s, reductions: what `search._placed.synced_s` remembers.
    """

    def __init__(self, costs: CostModel, crew: Crew, *, split_backward: bool, slack: float = ROUNDING) -> None:
        self.costs = costs
        self.split_backward = split_backward
        self._slack = slack
        self.pipelines = Pipelines(costs, crew.kinds, split_backward=split_backward)
        self.recomputing: Pipelines | None = None
        if any(kind.memory_bytes is not None for kind in crew.kinds):
            dearer = CostModel(costs.workload.recomputed(), costs.cluster)
            self.recomputing = Pipelines(dearer, crew.kinds, split_backward=split_backward)
        self.spent = 0
        self.crew = crew
        self._hosts = {worker.id: worker.host for worker in costs.cluster.workers}
        numbers = {host: number for number, host in enumerate(dict.fromkeys(self._hosts.values()))}
        self.host_numbers = {worker: numbers[host] for worker, host in self._hosts.items()}
        self._known: dict[tuple[object, ...], TimedPipeline] = {}
        # Each with what it was found under: under looser limits there may be a better one.
        self._rough: dict[tuple[object, ...], tuple[Floats, TimedPipeline]] = {}
        # By identity: all of them are known for good.
        self._replayed: dict[tuple[int, tuple[bool, ...]], TimedPipeline] = {}
        self._peaks: dict[int, int] = {}
        self.synced_s: dict[tuple[tuple[int, tuple[int, ...]], ...], float] = {}
        self.reductions: dict[tuple[Stops, ...], tuple[Reduction, ...]] = {}
        self._stages = stages_of(costs.workload)
        self._builders = {
            recompute: NetworkBuilder(costs, split_backward=split_backward, recompute=self._hosts if recompute else ())
            for recompute in (False, True)
        }

    @cached_property
    def work_s(self) -> float:
        """What the step takes workers that are never idle."""
        workload, crew = self.costs.workload, self.crew
        work_s = sum(layer.forward_s + layer.least_backward_s for layer in workload.layers)
        overhead_s = 2 * workload.operation_overhead_s
        return workload.micro_batches * (work_s / crew.speed + overhead_s / sum(crew.counts))

    def mean_formula_s(self, depth: int, share: float, sync: SyncCost) -> float:
        """A time that `mean_bound_s` cannot be less than, which is made in no time."""
        low = max(1, int(share))
        low_s, high_s = (self.pipelines.closed_form.least_s(depth, count, sync.per_byte_s) for count in (low, low + 1))
        return low_s + max(0.0, share - low) * (high_s - low_s)

    def mean_bound_s(self, depth: int, share: float, sync: SyncCost) -> float:
        """The bound of pipelines of this depth, of workers of one kind, with so many micro-batches on the average."""
        shape = (0,) * depth
        low = max(1, int(share))
        for pipelines in (self.pipelines, self.recomputing):
            if pipelines is not None:
                bounds = pipelines.bounds(sync)
                low_s, high_s = bounds.least_s(shape, low), bounds.least_s(shape, low + 1)
                if high_s < math.inf:
                    return low_s + max(0.0, share - low) * (high_s - low_s)
        return math.inf

    def sample(
        self, shape: Shape, stops: Stops, micro_batches: int, *, recompute: bool = False, effort: int
    ) -> TimedPipeline:
        """The pipeline on the first workers of its kinds."""
        workers = self.crew.sample(shape)
        return self.timed(workers, shape, stops, micro_batches, recompute=recompute, effort=effort)

    def rough(
        self, shape: Shape, stops: Stops, micro_batches: int, *, recompute: bool, latest_s: Floats
    ) -> TimedPipeline | None:
        """The same with a program that is found soon, and mostly longer by less than a hundredth.

        None where it was given up, for some stage would end later than `latest_s` has it, by stage.
        """
        workers = self.crew.sample(shape)
        key = shape, stops, micro_batches, self._same_host(workers), recompute
        known = self._rough.get(key)
        if known is not None and (latest_s <= known[0]).all():
            return known[1]
        self.spent += _ROUGH * len(stops) * micro_batches
        schedule = rough_schedule(
            hops_of(workers, stops),
            micro_batches,
            self._builders[recompute],
            ceiling=self.limits(shape, stops, micro_batches, recompute=recompute),
            slack=self._slack,
            latest_s=latest_s,
        )
        found = None if known is None else known[1]
        if schedule is not None and (found is None or schedule.step_s < found.program_s):
            found = TimedPipeline(shape, stops, micro_batches, recompute, workers, schedule, ends_s=schedule.last_s)
        if found is not None:
            self._rough[key] = latest_s, found
        return found

    def timed(
        self,
        workers: Sequence[int],
        shape: Shape,
        stops: Stops,
        micro_batches: int,
        *,
        recompute: bool = False,
        effort: int,
    ) -> TimedPipeline:
        """The pipeline on these workers, or on others that are linked alike, with its `best_program`."""
        key = shape, stops, micro_batches, self._same_host(workers), recompute, effort
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._scheduled(workers, shape, stops, micro_batches, recompute, effort)
        return found

    def moved(self, timed: TimedPipeline, workers: Sequence[int], *, effort: int) -> TimedPipeline:
        """The same pipeline on these workers."""
        return self.timed(
            workers, timed.shape, timed.stops, timed.micro_batches, recompute=timed.recompute, effort=effort
        )

    def replayed(self, timed: TimedPipeline, workers: Sequence[int]) -> TimedPipeline:
        """The same pipeline with the same orders on these workers, which is found sooner."""
        same_host = self._same_host(workers)
        if same_host == self._same_host(timed.workers):
            return timed
        key = id(timed), same_host
        found = self._replayed.get(key)
        if found is None:
            schedule = timed.schedule.replayed(hops_of(workers, timed.stops))
            found = self._replayed[key] = TimedPipeline(
                timed.shape,
                timed.stops,
                timed.micro_batches,
                timed.recompute,
                tuple(workers),
                schedule,
                ends_s=schedule.last_s,
            )
        return found

    def peak_bytes(self, timed: TimedPipeline) -> int:
        """Of the worker that needs most memory."""
        found = self._peaks.get(id(timed))
        if found is None:
            held = {position: (hop.layers,) for position, hop in enumerate(timed.schedule.hops)}
            state = self._stages.state_bytes(Placement(timed.stops[-1], held))
            moving = pipeline_bytes(timed.schedule, self._stages, recompute=[timed.recompute] * len(held))
            found = self._peaks[id(timed)] = max(state[position] + own for position, own in enumerate(moving))
        return found

    def limits(self, shape: Shape, stops: Stops, micro_batches: int, *, recompute: bool) -> Integers:
        """What each stage may have in flight, and keep; see `StageMemory.limits`."""
        pipelines = self.recomputing if recompute and self.recomputing is not None else self.pipelines
        return pipelines.memory.limits(stops, pipelines.capacities(shape), micro_batches)

    def _same_host(self, workers: Sequence[int]) -> tuple[bool, ...]:
        hosts = [self.host_numbers[worker] for worker in workers]
        return tuple(map(eq, hosts, hosts[1:]))

    def _scheduled(
        self,
        workers: Sequence[int],
        shape: Shape,
        stops: Stops,
        micro_batches: int,
        recompute: bool,
        effort: int,
    ) -> TimedPipeline:
        limits = self.limits(shape, stops, micro_batches, recompute=recompute)
        hops, builder = hops_of(workers, stops), self._builders[recompute]
        self.spent += effort
        schedule = pipeline_schedule(hops, micro_batches, builder, ceiling=limits, effort=effort, slack=self._slack)
        return TimedPipeline(
            shape=shape,
            stops=stops,
            micro_batches=micro_batches,
            recompute=recompute,
            workers=tuple(workers),
            schedule=schedule,
            ends_s=schedule.last_s,
        )


# Of many workers, and of many pipelines that are looked at, the stages are the same.
_layers: Final = lru_cache(maxsize=20_000)(LayerRange)


def hops_of(workers: Sequence[int], stops: Stops) -> tuple[Hop, ...]:
    """The route through these workers."""
    return tuple(map(Hop, workers, map(_layers, (0, *stops[:-1]), stops)))
