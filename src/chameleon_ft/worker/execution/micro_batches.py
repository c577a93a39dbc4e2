"""The micro-batches that a rank reads, which is no operation of a program.

A source reads them on the host, as a function of the step and the number of the micro-batch. It is told ahead of each
step which ones this rank will need, so that it can read while operations run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, Self

import torch
import xxhash
from torch import Tensor

from chameleon_ft.config import Batch, RunConfig
from chameleon_ft.data.mixture import sample_order
from chameleon_ft.data.order import EvaluationOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job import Dataset, Job
from chameleon_ft.schedule import Operation, OperationKind

KEPT_MICRO_BATCHES: Final = 64
"""The latest micro-batches stay loaded, because a hop reads its inputs, and later its targets, one by one."""


class MicroBatch(NamedTuple):
    """The samples of a micro-batch, stacked: (micro-batch, ...).

    Attributes:
        digest: A digest of the values of both tensors, as they were read: below 2**40, so that a float64 holds sums of
            many.
    """

    inputs: Tensor
    targets: Tensor
    digest: int = 0

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> MicroBatch:
        """Return tensors that were read, with their digest."""
        values = xxhash.xxh3_64()
        for tensor in (inputs, targets):
            values.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return cls(inputs, targets, values.intdigest() >> 24)


class SampleSource(Protocol):
    """Reads the samples of micro-batches, on the host."""

    def expect(self, step: int, wanted: Sequence[int], following: Sequence[int]) -> None:
        """Learn which micro-batches of a step this rank will read, in order, and those of each step after it."""

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """Return the samples of a micro-batch; wait until they are there."""
        ...


class DatasetReads:
    """Reads the samples of a job's map-style dataset in this thread, when they are needed.

    Args:
        dataset: has the samples; None: that of the job.
        order: their order; None: that of training.
        first_sample: Returns the position of the first sample of a step; None: all steps from 0 on have this batch.
        reading: Returns a context inside which the sample of this description is read.
    """

    def __init__(
        self,
        job: Job,
        batch: Batch,
        *,
        seed: int,
        dataset: Dataset | None = None,
        order: EvaluationOrder | None = None,
        first_sample: Callable[[int], int] | None = None,
        reading: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._dataset: Dataset = dataset or job.dataset
        self._collate = job.collate
        self._batch = batch
        self._order = order or sample_order(self._dataset, seed)
        self._first_sample = first_sample or (lambda step: step * batch.samples)
        self._reading = reading

    @classmethod
    def of(cls, job: Job, config: RunConfig, *, reading: Callable[[str], AbstractContextManager[object]]) -> Self:
        """Return the reads of a run."""
        return cls(job, config.batch, seed=config.seed, first_sample=config.first_sample, reading=reading)

    def expect(self, step: int, wanted: Sequence[int], following: Sequence[int]) -> None:
        """See `SampleSource`."""

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """See `SampleSource`."""
        size = self._batch.micro_batch_size
        first = self._first_sample(step) + micro_batch * size

        def reading(index: int) -> AbstractContextManager[object]:
            return self._reading(f"reading sample {index} of micro-batch {micro_batch} in step {step}")

        read = load_micro_batch(self._dataset, self._order, first, size, collate=self._collate, reading=reading)
        return MicroBatch.of(*read)


class MicroBatches:
    """The micro-batches of a source on `device`, of which the latest are kept."""

    def __init__(self, source: SampleSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._load = lru_cache(KEPT_MICRO_BATCHES)(self._loaded)

    def expect(self, step: int, operations: Iterable[Operation], following: Iterable[Operation]) -> None:
        """Tell the source that a step is to run these operations, and each step after it the following ones."""
        self._source.expect(step, _reads_of(operations), _reads_of(following))

    def __call__(self, step: int, micro_batch: int) -> MicroBatch:
        """Return the samples for (step, number of the micro-batch in the global batch of the step)."""
        return self._load(step, micro_batch)

    def _loaded(self, step: int, micro_batch: int) -> MicroBatch:
        inputs, targets, digest = self._source.read(step, micro_batch)
        return MicroBatch(inputs.to(self._device), targets.to(self._device), digest)


def reads_samples(operation: Operation) -> bool:
    """Return whether samples are read for an operation: as the inputs of layer 0, or for the loss."""
    return operation.kind is OperationKind.FORWARD and (operation.first or operation.last)


def _reads_of(operations: Iterable[Operation]) -> list[int]:
    return list(dict.fromkeys(each.micro_batch for each in operations if reads_samples(each)))
