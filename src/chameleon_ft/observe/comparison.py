"""What was predicted of a run's steps beside what was measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from chameleon_ft.errors import ConfigError
from chameleon_ft.estimate import StepEstimate, estimate_step
from chameleon_ft.observe.accuracy import describe_untrusted
from chameleon_ft.observe.lanes import Lane, WorkerReduction
from chameleon_ft.observe.plans import CostsFrom, GenerationPlan
from chameleon_ft.observe.timelines import RecordedStep
from chameleon_ft.plan import LayerRange, RecomputedLayers
from chameleon_ft.schedule import CostModel, Operation, OperationKind, TimedOperation, Timeline

__all__ = ["GenerationComparison", "KindComparison", "MeasuredStep", "compare_generations", "measured_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A recorded step, put together from its workers.

    Attributes:
        lane: operations and reductions, in seconds since the first worker began the step.
        step_s: until the last worker had applied the update.
    """

    generation: int
    step: int
    lane: Lane
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindComparison:
    """All operations of a kind in the recorded steps of a generation; seconds are means, errors relative."""

    kind: OperationKind
    count: int
    predicted_s: float
    measured_s: float
    mean_error: float
    """Mean of |predicted - measured| / measured, over the operations that take any time; 0 where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationComparison:
    """One generation: what its plan predicts of a step, and the steps that were recorded.

    Attributes:
        costs_from: where the costs of the prediction are from; "measured" also where they are the recorded operations
            of this generation themselves, as in a run without a profile.
        predicted: of a step; without its vote and update.
        steps: as recorded, in order; not the first of the generation, in which everything is done for the first time,
            unless there is no other.
        kinds: operation by operation, by kind.
    """

    generation: int
    plan: GenerationPlan
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
        """That the prediction is too far off to be trusted, and what to do; None if it is not."""
        return describe_untrusted(step_error=self.error)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
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
                kind.kind.value: {
                    "count": kind.count,
                    "predicted_s": kind.predicted_s,
                    "measured_s": kind.measured_s,
                    "mean_error": kind.mean_error,
                }
                for kind in self.kinds
            },
        }


def compare_generations(
    plans: Mapping[int, GenerationPlan], recorded: Iterable[RecordedStep]
) -> tuple[GenerationComparison, ...]:
    """Lay the recorded steps of each generation over what its plan predicts; generations without any are left out."""
    by_generation: dict[int, list[MeasuredStep]] = defaultdict(list)
    for step in measured_steps(plans, recorded):
        by_generation[step.generation].append(step)
    return tuple(_compare(plans[generation], steps) for generation, steps in sorted(by_generation.items()))


def measured_steps(plans: Mapping[int, GenerationPlan], recorded: Iterable[RecordedStep]) -> list[MeasuredStep]:
    """Put the recorded steps together; those that a worker did not finish, for the generation ended, are left out.

    Raises ConfigError where records do not fit the plan of their generation.
    """
    found = []
    for (_, generation), group in groupby(recorded, key=lambda record: (record.step, record.generation)):
        records = list(group)
        if generation not in plans:
            raise ConfigError(f"step {records[0].step} was recorded in generation {generation}, whose plan is missing")
        plan = plans[generation]
        if {record.worker for record in records} >= set(plan.plan.workers):
            found.append(_measured(plan, records))
    return found


class _ObservedCosts(CostModel):
    """A cost model that knows what operations really took, where they were recorded."""

    def __init__(self, base: CostModel, observed: Mapping[tuple[int, OperationKind, LayerRange], float]) -> None:
        super().__init__(base.workload, base.cluster)
        object.__setattr__(self, "observed", observed)

    def pace(self, worker: int) -> float:
        """Every worker has its own."""
        return worker

    def compute_s(
        self, worker: int, kind: OperationKind, layers: LayerRange, *, recompute: RecomputedLayers | None = None
    ) -> float:
        observed: Mapping[tuple[int, OperationKind, LayerRange], float] = self.observed  # type: ignore[attr-defined]
        found = observed.get((worker, kind, layers))
        return CostModel.compute_s(self, worker, kind, layers, recompute=recompute) if found is None else found


def _compare(plan: GenerationPlan, steps: Sequence[MeasuredStep]) -> GenerationComparison:
    steps = steps[1:] or steps
    has_profile = plan.costs_from in ("profile", "corrected")
    costs = plan.costs if has_profile else _ObservedCosts(plan.costs, _medians(steps))
    predicted = estimate_step(plan.plan, plan.program, costs)
    return GenerationComparison(
        generation=plan.generation,
        plan=plan,
        costs_from=plan.costs_from if has_profile else "measured",
        predicted=predicted,
        steps=tuple(steps),
        kinds=tuple(_kinds(predicted.timeline, steps)),
    )


def _kinds(predicted: Timeline, steps: Sequence[MeasuredStep]) -> Iterable[KindComparison]:
    expected: dict[tuple[int, Operation], float] = {
        (timed.worker, timed.operation): timed.end_s - timed.start_s for timed in predicted.operations
    }
    pairs: dict[OperationKind, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        for timed in step.lane.timeline.operations:
            pairs[timed.operation.kind].append((expected[timed.worker, timed.operation], timed.end_s - timed.start_s))
    for kind in OperationKind:
        if found := pairs[kind]:
            yield KindComparison(
                kind=kind,
                count=len(found),
                predicted_s=statistics.fmean(predicted_s for predicted_s, _ in found),
                measured_s=statistics.fmean(measured_s for _, measured_s in found),
                mean_error=_mean([abs(p - m) / m for p, m in found if p > 0 and m > 0]),
            )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _medians(steps: Sequence[MeasuredStep]) -> dict[tuple[int, OperationKind, LayerRange], float]:
    found: dict[tuple[int, OperationKind, LayerRange], list[float]] = defaultdict(list)
    for step in steps:
        for timed in step.lane.timeline.operations:
            key = (timed.worker, timed.operation.kind, timed.operation.layers)
            found[key].append(timed.end_s - timed.start_s)
    return {key: statistics.median(times) for key, times in found.items()}


def _measured(plan: GenerationPlan, records: Sequence[RecordedStep]) -> MeasuredStep:
    origin = min(record.time for record in records)
    operations: list[TimedOperation] = []
    reductions: list[WorkerReduction] = []
    for record in records:
        own = plan.program.of(record.worker)
        if len(own) != len(record.operations):
            raise ConfigError(
                f"worker {record.worker} recorded {len(record.operations)} operations in step {record.step}, "
                f"and the program of generation {plan.generation} has {len(own)}"
            )
        offset = record.time - origin
        operations += (
            TimedOperation(record.worker, operation, offset + start, offset + end)
            for operation, (start, end) in zip(own, record.operations, strict=True)
        )
        reductions += (
            WorkerReduction(
                record.worker, LayerRange(each.start, each.stop), offset + each.start_s, offset + each.end_s
            )
            for each in record.reductions
        )
    return MeasuredStep(
        generation=plan.generation,
        step=records[0].step,
        lane=Lane("measured", Timeline(tuple(operations)), tuple(reductions)),
        step_s=max(record.time - origin + record.end_s for record in records),
    )
