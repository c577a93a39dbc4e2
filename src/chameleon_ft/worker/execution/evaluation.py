"""Evaluation: the loss and the metrics of held-out samples, by forwards over the routes of the plan in force."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from chameleon_ft.config import RunConfig
from chameleon_ft.keys import generators_kept
from chameleon_ft.models.precision import as_loss_input
from chameleon_ft.schedule import Operation, forwards_of
from chameleon_ft.trees import is_differentiable
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.execution.bad_steps import noting
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.micro_batches import EvaluationReads, MicroBatches, SampleSource, evaluated_samples
from chameleon_ft.worker.execution.steps import StepState, StepStats


@dataclass(frozen=True, slots=True)
class EvaluationBatches:
    """The micro-batches of an evaluation, and how much each counts.

    Losses and metrics are sums over samples. If the samples do not fill the last micro-batch, it is filled with copies
    of the last sample. One more micro-batch has that sample alone, and what the copies have added is subtracted by it.
    So all have one shape, the last layer may return any, and the sums are exact.

    Attributes:
        samples: number of samples.
        size: samples of a micro-batch.
    """

    samples: int
    size: int

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return math.ceil(self.samples / self.size) + (1 if self.samples % self.size else 0)

    def weight(self, number: int) -> float:
        """Return by how much the sums of a micro-batch count."""
        return 1.0 if number * self.size < self.samples else self.samples % self.size / self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSums:
    """Sums over the samples of an evaluation, of one worker or of all.

    Attributes:
        labels: Loss terms of micro-batches whose targets are whole numbers, such as the ids of tokens.
        metrics: By the names of the job's metrics.
    """

    loss: float = 0.0
    terms: float = 0.0
    samples: float = 0.0
    labels: float = 0.0
    metrics: Mapping[str, float]

    def ballot(self) -> list[float]:
        """Return the numbers, which `of_ballot` reads."""
        return [self.loss, self.terms, self.samples, self.labels, *self.metrics.values()]

    def of_ballot(self, numbers: Sequence[float]) -> Self:
        """Return the sums of these numbers, with the same metrics."""
        loss, terms, samples, labels, *metrics = numbers
        named = dict(zip(self.metrics, metrics, strict=True))
        return replace(self, loss=loss, terms=terms, samples=samples, labels=labels, metrics=named)


class Evaluator:
    """Evaluates the layers of a rank, when all ranks do.

    Args:
        source: of all samples of the run; see `RunReads`.
    """

    def __init__(self, rank: RankContext, config: RunConfig, source: SampleSource) -> None:
        self._rank = rank
        self._every = config.evaluation.every
        self._batch = config.batch
        self._batches = EvaluationBatches(evaluated_samples(rank.job, config), config.batch.micro_batch_size)
        self._micro_batches = MicroBatches(EvaluationReads(source), rank.device, rank.job)
        self._asked = self._answered = 0

    def is_due(self, step: int, *, request: int) -> bool:
        """Return whether to evaluate the state before `step`; `request` is the newest request of the coordinator."""
        self._asked = request
        return request > self._answered or (self._every > 0 and step % self._every == 0)

    def run(
        self, executor: Executor, state: StepState, operations: Sequence[Operation], *, after: Callable[[int], None]
    ) -> tuple[EvaluationSums, StepStats]:
        """Run this worker's forwards, and return its sums; training continues after them as if they had not been.

        Args:
            executor: that of training.
            state: of the evaluation, to be held until all workers have run theirs.
            operations: those of the worker in the step that follows.
            after: See `Executor.run`.

        Raises:
            CommunicationError: the generation is over.
        """
        self._answered = self._asked
        job, metrics, labels = self._rank.job, dict.fromkeys(self._rank.job.metrics, 0.0), 0.0

        def measure(number: int, output: Any, targets: Any) -> None:
            nonlocal labels
            weight = self._batches.weight(number)
            if not state.losses[number].terms:
                return
            if isinstance(targets, Tensor) and not is_differentiable(targets.dtype):
                labels += weight * state.losses[number].terms
            output = as_loss_input(job, output)
            for name, metric in job.metrics.items():
                with noting(f"in the metric {name!r}"):
                    metrics[name] += weight * float(metric(output, targets))

        routes = self._batch.micro_batches_at(state.step + 1)
        program = forwards_of(operations, micro_batches=routes, count=self._batches.count)
        self._micro_batches.expect(state.step, program, lambda step: ())
        evaluating = replace(executor, micro_batches=self._micro_batches)
        with executor.held.evaluating(), generators_kept(self._rank.device):
            stats = evaluating.evaluate(state, program, measure=measure, after=after)
        weighted = [(self._batches.weight(number), each) for number, each in state.losses.items()]
        sums = EvaluationSums(
            loss=math.fsum(weight * float(each.value) for weight, each in weighted),
            terms=math.fsum(weight * each.terms for weight, each in weighted),
            samples=math.fsum(weight * each.samples for weight, each in weighted),
            labels=labels,
            metrics=metrics,
        )
        return sums, stats
