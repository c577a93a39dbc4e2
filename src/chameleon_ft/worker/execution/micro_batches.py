"""The micro-batches that a rank reads, which is no operation of a program.

A source reads them on the host, as a function of the step and the number of the micro-batch. It is told ahead of each
step which ones this rank will need, so that it can read while operations run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from chameleon_ft.config import Batch, RunConfig
from chameleon_ft.data.mixture import sample_order
from chameleon_ft.data.order import EvaluationOrder
from chameleon_ft.data.samples import fields_of, load_micro_batch
from chameleon_ft.job import Dataset, Job
from chameleon_ft.models.fields import require_padding_at_end
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.side_outputs import AUXILIARY

KEPT_MICRO_BATCHES: Final = 64
"""The latest micro-batches stay loaded, because a hop reads its inputs, and later its targets, one by one."""


class MicroBatch(NamedTuple):
    """The samples of a micro-batch, stacked: tensors (micro-batch, ...), or trees of them; the inputs may be fields.

    Attributes:
        digest: A digest of the values of all tensors, as they were read: below 2**40, so that a float64 holds sums of
            many.
    """

    inputs: Any
    targets: Any
    digest: int = 0

    @classmethod
    def of(cls, inputs: Any, targets: Any) -> MicroBatch:
        """Return what was read, with its digest."""
        values = xxhash.xxh3_64()
        for tensor in tree_leaves((inputs, targets)):
            values.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return cls(inputs, targets, values.intdigest() >> 24)

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """The fields by name, which layers get by keyword."""
        return fields_of(self.inputs, self.targets)

    def input_of(self, job: Job) -> Tensor:
        """Return the first argument of layer 0."""
        first: Tensor = self.fields[job.fields[0][0]] if job.fields else self.inputs
        return first


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

    def __init__(self, source: SampleSource, device: torch.device, job: Job) -> None:
        self._source = source
        self._job = job
        self._device = device
        self._load = lru_cache(KEPT_MICRO_BATCHES)(self._loaded)

    def expect(self, step: int, operations: Iterable[Operation], following: Iterable[Operation]) -> None:
        """Tell the source that a step is to run these operations, and each step after it the following ones."""
        self._source.expect(step, self._reads_of(operations), self._reads_of(following))

    def __call__(self, step: int, micro_batch: int) -> MicroBatch:
        """Return the samples for (step, number of the micro-batch in the global batch of the step)."""
        return self._load(step, micro_batch)

    def _loaded(self, step: int, micro_batch: int) -> MicroBatch:
        read = self._source.read(step, micro_batch)
        require_padding_at_end(self._job, read.fields)
        if isinstance(read.inputs, Tensor) and isinstance(read.targets, Tensor):
            return MicroBatch(read.inputs.to(self._device), read.targets.to(self._device), read.digest)
        inputs, targets = tree_map(lambda tensor: tensor.to(self._device), (read.inputs, read.targets))
        return MicroBatch(inputs, targets, read.digest)

    def _reads_of(self, operations: Iterable[Operation]) -> list[int]:
        return list(dict.fromkeys(each.micro_batch for each in operations if reads_samples(each, self._job)))


def reads_samples(operation: Operation, job: Job) -> bool:
    """Return whether samples are read for an operation: for layer 0, as fields, for the loss, or for its terms."""
    if operation.kind is not OperationKind.FORWARD:
        return False
    if operation.last or uses_inputs(operation, job):
        return True
    return bool(job.side_outputs) and any(AUXILIARY in job.side_outputs[layer] for layer in operation.layers)


def uses_inputs(operation: Operation, job: Job) -> bool:
    """Return whether layers of an operation use the inputs of the micro-batch: layer 0, and those with fields."""
    return operation.first or any(map(job.keywords, operation.layers))
