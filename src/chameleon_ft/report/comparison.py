"""Predicted and measured times of a run's steps."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

from chameleon_ft.cost.step import StepEstimate, estimate_step
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.records import describe_untrusted
from chameleon_ft.plan import LayerRange, RecomputedLayers
from chameleon_ft.recovery.generation import CostsFrom, GenerationSpec
from chameleon_ft.report.picture import Lane, WorkerReduction
from chameleon_ft.schedule import CostModel, Operation, OperationKind, TimedOperation, Timeline
from chameleon_ft.storage.timelines import RecordedStep

_OperationKey: TypeAlias = tuple[int, OperationKind, LayerRange]
"""Worker, kind and layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A recorded step of all workers; times are in seconds since the first worker began the step.

    Attributes:
        lane: operations and reductions.
        step_s: until the last worker had applied the update.
    """

    generation: int
    step: int
    lane: Lane
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindComparison:
    """All operations of a kind in the recorded steps of a generation.

    Attributes:
        count: number of operations.
        predicted_s: mean.
        measured_s: mean.
        mean_error: mean of |predicted - measured| / measured, over operations that take any time; 0 if there are none.
    """

    kind: OperationKind
    count: int
    predicted_s: float
    measured_s: float
    mean_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationComparison:
    """The predicted step of a generation and its recorded steps.

    Attributes:
        costs_from: source of the costs of the prediction; "measured" also for recorded operations of this generation
            itself, as in a run without a profile.
        predicted: a step without its vote and update.
        steps: recorded steps in order, without the first of the generation, which includes one-time work, unless it is
            the only one.
        kinds: comparison of single operations, by kind.
    """

    generation: int
    plan: GenerationSpec
    costs_from: CostsFrom
    predicted: StepEstimate
    steps: tuple[MeasuredStep, ...]
    kinds: tuple[KindComparison, ...]

    @property
    def measured_s(self) -> float:
        """Median of the recorded steps, vote and update included."""
        return statistics.median(step.step_s for step in self.steps)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, of the step."""
        return self.predicted.step_s / self.measured_s - 1

    @property
    def warning(self) -> str | None:
        """See `describe_untrusted`; none if one step alone was recorded, which proves little."""
        return None if len(self.steps) < 2 else describe_untrusted(step_error=self.error)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "generation": self.generation,
            "costs_from": self.costs_from,
            "predicted_step_s": self.predicted.step_s,
            "measured_step_s": self.measured_s,
            "error": self.error,
            "warning": self.warning,
            "steps": [
                {
                    "step": step.step,
                    "measured_s": step.step_s,
                    "operations_s": step.lane.program_s,
                    "error": self.predicted.step_s / step.step_s - 1,
                }
                for step in self.steps
            ],
            "kinds": {
                each.kind.value: {name: value for name, value in asdict(each).items() if name != "kind"}
                for each in self.kinds
            },
        }


def compare_generations(
    plans: Mapping[int, GenerationSpec], recorded: Iterable[RecordedStep]
) -> tuple[GenerationComparison, ...]:
    """Compare the recorded steps of each generation with the prediction of its plan, and omit those without any.

    Of a generation in which the batch has grown, each plan has a comparison of its own.
    """
    of_plan: dict[tuple[int, int], list[MeasuredStep]] = defaultdict(list)
    for step in measured_steps(plans, recorded):
        of_plan[step.generation, plans[step.generation].at(step.step).first_step].append(step)
    return tuple(_compare(plans[generation].at(first), steps) for (generation, first), steps in sorted(of_plan.items()))


def measured_steps(plans: Mapping[int, GenerationSpec], recorded: Iterable[RecordedStep]) -> list[MeasuredStep]:
    """Combine the records of each step, sorted by step and generation; omit what not every worker ran as a whole step.

    Raises ConfigError if records do not fit the plan of their generation.
    """
    found = []
    whole = (record for record in recorded if record.part == "whole")
    for _, group in groupby(whole, key=lambda record: (record.step, record.generation)):
        records = list(group)
        plan = _plan_of(records[0], plans)
        if {record.worker for record in records} >= set(plan.plan.workers):
            found.append(_measured_step(plan, records))
    return found


def planned_operations(record: RecordedStep, plans: Mapping[int, GenerationSpec]) -> tuple[Operation, ...]:
    """Return the operations of a worker in a whole step. Raises ConfigError if the record does not fit its plan."""
    return _operations_of(record, _plan_of(record, plans))


def _plan_of(record: RecordedStep, plans: Mapping[int, GenerationSpec]) -> GenerationSpec:
    if record.generation not in plans:
        raise ConfigError(f"step {record.step} was recorded in generation {record.generation}, whose plan is missing")
    return plans[record.generation].at(record.step)


def _operations_of(record: RecordedStep, plan: GenerationSpec) -> tuple[Operation, ...]:
    program = plan.program.of(record.worker)
    if len(program) != len(record.operations):
        raise ConfigError(
            f"worker {record.worker} recorded {len(record.operations)} operations in step {record.step}, "
            f"and the program of generation {plan.generation} has {len(program)}"
        )
    return program


def _measured_step(plan: GenerationSpec, records: Sequence[RecordedStep]) -> MeasuredStep:
    origin = min(record.time for record in records)
    operations: list[TimedOperation] = []
    reductions: list[WorkerReduction] = []
    for record in records:
        offset = record.time - origin
        for operation, (start, end) in zip(_operations_of(record, plan), record.operations, strict=True):
            operations.append(TimedOperation(record.worker, operation, offset + start, offset + end))
        for each in record.reductions:
            layers = LayerRange(each.start, each.stop)
            reductions.append(WorkerReduction(record.worker, layers, offset + each.start_s, offset + each.end_s))
    return MeasuredStep(
        generation=plan.generation,
        step=records[0].step,
        lane=Lane("measured", Timeline(tuple(operations)), tuple(reductions)),
        step_s=max(record.time - origin + record.end_s for record in records),
    )


@dataclass(frozen=True)
class _MeasuredCosts(CostModel):
    """A cost model in which recorded operations and reductions take their measured times."""

    measured_s: Mapping[_OperationKey, float] = field(default_factory=dict, compare=False)
    reductions_s: Mapping[LayerRange, float] = field(default_factory=dict, compare=False)

    def pace(self, worker: int) -> float:
        # Operations may take different times on any two workers.
        return worker

    def compute_s(
        self, worker: int, kind: OperationKind, layers: LayerRange, *, recompute: RecomputedLayers | None = None
    ) -> float:
        if (seconds := self.measured_s.get((worker, kind, layers))) is not None:
            return seconds
        return CostModel.compute_s(self, worker, kind, layers, recompute=recompute)

    def all_reduce_s(self, layers: LayerRange, holders: Collection[int], num_bytes: int) -> float:
        seconds = self.reductions_s.get(layers)
        return CostModel.all_reduce_s(self, layers, holders, num_bytes) if seconds is None else seconds


def _compare(plan: GenerationSpec, steps: Sequence[MeasuredStep]) -> GenerationComparison:
    steps = steps[1:] or steps
    costs, costs_from = plan.costs, plan.costs_from
    if costs_from not in ("profile", "corrected"):
        own = _operation_times(steps), _reduction_times(steps)
        costs, costs_from = _MeasuredCosts(costs.workload, costs.cluster, *own), "measured"
    predicted = estimate_step(plan.plan, plan.program, costs)
    return GenerationComparison(
        generation=plan.generation,
        plan=plan,
        costs_from=costs_from,
        predicted=predicted,
        steps=tuple(steps),
        kinds=tuple(_compare_kinds(predicted.timeline, steps)),
    )


def _operation_times(steps: Sequence[MeasuredStep]) -> dict[_OperationKey, float]:
    """Return the seconds of the operations of each worker: the median over steps of their mean in a step.

    A worker runs all its operations one after the other, so of times that vary in a step the mean counts.
    """
    means: dict[_OperationKey, list[float]] = defaultdict(list)
    for step in steps:
        own: dict[_OperationKey, list[float]] = defaultdict(list)
        for timed in step.lane.timeline.operations:
            own[timed.worker, timed.operation.kind, timed.operation.layers].append(timed.end_s - timed.start_s)
        for key, times in own.items():
            means[key].append(statistics.fmean(times))
    return {key: statistics.median(each) for key, each in means.items()}


def _reduction_times(steps: Sequence[MeasuredStep]) -> dict[LayerRange, float]:
    """Return the median seconds of the all-reduce of each range of layers, without the waiting for other holders.

    The last holder to come to a reduction waits for no other, so the shortest time of all holders counts. Ranges of
    which a worker has several in a step, because layers share parameters, are left out.
    """
    found: dict[LayerRange, list[float]] = defaultdict(list)
    for step in steps:
        shortest_s: dict[LayerRange, float] = {}
        by_worker: dict[int, list[WorkerReduction]] = defaultdict(list)
        for each in step.lane.reductions:
            by_worker[each.worker].append(each)
        repeated = {
            layers for own in by_worker.values() for layers, n in Counter(each.layers for each in own).items() if n > 1
        }
        for own in by_worker.values():
            # A worker reduces one after the other.
            free_s = -math.inf
            for each in sorted(own, key=attrgetter("end_s")):
                seconds = each.end_s - max(each.start_s, free_s)
                shortest_s[each.layers] = min(seconds, shortest_s.get(each.layers, math.inf))
                free_s = each.end_s
        for layers in shortest_s.keys() - repeated:
            found[layers].append(shortest_s[layers])
    return {layers: statistics.median(each) for layers, each in found.items()}


def _compare_kinds(predicted: Timeline, steps: Sequence[MeasuredStep]) -> Iterable[KindComparison]:
    expected = {(timed.worker, timed.operation): timed.end_s - timed.start_s for timed in predicted.operations}
    pairs: dict[OperationKind, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        for timed in step.lane.timeline.operations:
            pairs[timed.operation.kind].append((expected[timed.worker, timed.operation], timed.end_s - timed.start_s))
    for kind in OperationKind:
        if found := pairs[kind]:
            errors = [abs(p - m) / m for p, m in found if p > 0 and m > 0]
            yield KindComparison(
                kind=kind,
                count=len(found),
                predicted_s=statistics.fmean(p for p, _ in found),
                measured_s=statistics.fmean(m for _, m in found),
                mean_error=statistics.fmean(errors) if errors else 0.0,
            )
