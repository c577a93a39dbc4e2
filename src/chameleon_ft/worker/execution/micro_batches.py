"""The micro-batches that a rank reads, which is no operation of a program.

A source reads them on the host, as a function of the step and the number of the micro-batch. It is told ahead of each
step which ones this rank will need, so that it can read while operations run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from chameleon_ft.config import Batch, RunConfig
from chameleon_ft.data.buckets import buckets_of
from chameleon_ft.data.mixture import sample_order
from chameleon_ft.data.order import EvaluationOrder
from chameleon_ft.data.samples import fields_of, load_micro_batch, load_readable
from chameleon_ft.job.datasets import Dataset, is_stream
from chameleon_ft.job.job import Job
from chameleon_ft.models.fields import require_padding_at_end
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.side_outputs import AUXILIARY
from chameleon_ft.trees import leaves_of, mapped
from chameleon_ft.worker.device import copied_to_device
from chameleon_ft.worker.execution.bad_steps import describe_error

KEPT_MICRO_BATCHES: Final = 64
"""The latest micro-batches stay loaded, because a hop reads its inputs, and later its targets, one by one."""


EVALUATION: Final = -1
"""Stands for the step where the held-out samples are read, which do not depend on it."""


def place_of(step: int, micro_batch: int) -> str:
    """Return the micro-batch of a step, or of an evaluation, in words."""
    return f"micro-batch {micro_batch} {'to evaluate' if step == EVALUATION else f'in step {step}'}"


class MicroBatch(NamedTuple):
    """The samples of a micro-batch, stacked: tensors (micro-batch, ...), or trees of them; the inputs may be fields.

    Attributes:
        digest: A digest of the values of all tensors, as they were read: below 2**40, so that a float64 holds sums of
            many.
        left_out: The rows that do not count, because their samples cannot be read, with the error that this worker has
            met; empty if all workers leave it out.
    """

    inputs: Any
    targets: Any
    digest: int = 0
    left_out: Mapping[int, str] = FrozenMap({})

    @classmethod
    def of(cls, inputs: Any, targets: Any, left_out: Mapping[int, str] = FrozenMap({})) -> MicroBatch:
        """Return what was read, with the digest of the rows that count."""
        values = xxhash.xxh3_64()
        for tensor in leaves_of(without_rows((inputs, targets), left_out)):
            values.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return cls(inputs, targets, values.intdigest() >> 24, left_out)

    @property
    def counted(self) -> Any:
        """The targets of the samples that count."""
        return without_rows(self.targets, self.left_out)

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """The fields by name, which layers get by keyword."""
        return fields_of(self.inputs, self.targets)

    def input_of(self, job: Job) -> Any:
        """Return the first argument of layer 0."""
        return self.fields[job.fields[0][0]] if job.fields else self.inputs


def without_rows(tensors: Any, rows: Collection[int]) -> Any:
    """Return a tensor, or a tree of them, without some rows."""
    if not rows:
        return tensors
    return mapped(lambda tensor: tensor[[row for row in range(len(tensor)) if row not in rows]], tensors)


Draw = tuple[int, int]
"""(epoch, id of a sample)"""


class SampleSource(Protocol):
    """Reads the samples of micro-batches, on the host."""

    def expect(self, step: int, wanted: Sequence[int], following: Callable[[int], Sequence[int]]) -> Sequence[int]:
        """Learn which micro-batches of a step this rank will read, in order, and what returns those of a later step.

        Return those of the step whose samples are there.
        """
        return ()

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """Return the samples of a micro-batch; wait until they are there."""
        ...


class DatasetReads(SampleSource):
    """Reads the samples of a job's map-style dataset in this thread, when they are needed.

    Args:
        dataset: has the samples; None: that of the job.
        order: their order; None: that of training.
        first_sample: Returns the position of the first sample of a step; None: all steps from 0 on have this batch.
        reading: Returns a context inside which the sample of this description is read.
        is_tolerant: Whether samples that cannot be read are left out.
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
        is_tolerant: bool = False,
    ) -> None:
        self._dataset: Dataset = dataset or job.dataset
        self._collate = job.collate
        self._batch = batch
        self._order = order or sample_order(self._dataset, seed)
        self._first_sample = first_sample or batch.samples_before
        self._reading = reading
        self._is_tolerant = is_tolerant

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """See `SampleSource`."""
        size = self._batch.micro_batch_size
        first = self._first_sample(step) + micro_batch * size

        def reading(index: int) -> AbstractContextManager[object]:
            return self._reading(f"reading sample {index} of {place_of(step, micro_batch)}")

        if not self._is_tolerant:
            read = load_micro_batch(self._dataset, self._order, first, size, collate=self._collate, reading=reading)
            return MicroBatch.of(*read)
        pair, errors = load_readable(self._dataset, self._order, first, size, collate=self._collate, reading=reading)
        if errors and any(tensor.shape[:1] != (size,) for tensor in leaves_of(pair)):
            # There is no row to leave out.
            raise next(iter(errors.values()))
        return MicroBatch.of(*pair, {row: describe_error(error) for row, error in errors.items()})

    def draws(self, step: int, micro_batch: int) -> list[Draw]:
        """Return which samples a micro-batch has, by their rows."""
        size = self._batch.micro_batch_size
        draws = self._order.draws_at(self._first_sample(step) + micro_batch * size, size)
        return [(epoch, index) for index, epoch in draws]


class RunReads(SampleSource):
    """Reads all samples of a run in this thread: those of training, and those of evaluations as step `EVALUATION`."""

    def __init__(
        self, job: Job, config: RunConfig, *, reading: Callable[[str], AbstractContextManager[object]]
    ) -> None:
        self._training: DatasetReads | None = None
        self._evaluation: DatasetReads | None = None
        reads = partial(DatasetReads, job, config.batch, seed=config.seed, reading=reading)
        # A stream is read elsewhere.
        if not is_stream(job.dataset):
            is_tolerant = config.loading.on_error == "skip"
            self._training = reads(first_sample=config.first_sample, is_tolerant=is_tolerant)
        if job.evaluation is not None:
            order = EvaluationOrder(evaluated_samples(job, config), config.seed)
            self._evaluation = reads(dataset=job.evaluation, order=order, first_sample=lambda step: 0)

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """See `SampleSource`."""
        reads = self._evaluation if step == EVALUATION else self._training
        assert reads is not None
        return reads.read(step, micro_batch)

    def draws(self, step: int, micro_batch: int) -> list[Draw]:
        """Return which samples a micro-batch of training has, by their rows."""
        assert self._training is not None
        return self._training.draws(step, micro_batch)


@dataclass(frozen=True, slots=True)
class EvaluationReads(SampleSource):
    """The held-out samples of a source, for every step that is evaluated."""

    source: SampleSource

    def expect(self, step: int, wanted: Sequence[int], following: Callable[[int], Sequence[int]]) -> Sequence[int]:
        """See `SampleSource`."""
        return self.source.expect(EVALUATION, wanted, following)

    def read(self, step: int, micro_batch: int) -> MicroBatch:
        """See `SampleSource`."""
        return self.source.read(EVALUATION, micro_batch)


def evaluated_samples(job: Job, config: RunConfig) -> int:
    """Return how many of the job's held-out samples are evaluated."""
    assert job.evaluation is not None
    return min(len(job.evaluation), config.evaluation.samples or len(job.evaluation))


class MicroBatches:
    """The micro-batches of a source on `device`, of which the latest are kept.

    Args:
        draws: Returns which samples the micro-batch of a step has, by their rows; for a source that leaves some out.
        unread: Is called with the step, a sample that this worker cannot read, and its error.

    Attributes:
        wait_s: Seconds in which samples have been read, or waited for, since the last step was expected.
    """

    def __init__(
        self,
        source: SampleSource,
        device: torch.device,
        job: Job,
        *,
        draws: Callable[[int, int], Sequence[Draw]] = lambda step, micro_batch: (),
        unread: Callable[[int, Draw, str], None] = lambda step, draw, error: None,
    ) -> None:
        self._source = source
        self._job = job
        self._device = device
        self.draws = draws
        self._unread = unread
        self._left_out: frozenset[Draw] = frozenset()
        self._load = lru_cache(KEPT_MICRO_BATCHES)(self._loaded)
        self._buckets = buckets_of(job)
        self._bucket = lru_cache(1024)(self._found_bucket)
        self.wait_s = 0.0

    def leave_out(self, draws: Iterable[Draw]) -> None:
        """Leave samples out of their micro-batches from now on, as all workers do."""
        if not self._left_out.issuperset(draws := frozenset(draws)):
            self._left_out |= draws
            self._load.cache_clear()

    def expect(
        self, step: int, operations: Iterable[Operation], following: Callable[[int], Iterable[Operation]]
    ) -> None:
        """Tell the source that a step is to run these operations; `following` returns those of a later step.

        What the source has is taken over at once, because between operations the processor's caches have other things.
        """
        start = perf_counter()
        there = self._source.expect(step, self._reads_of(operations), lambda later: self._reads_of(following(later)))
        self.wait_s = perf_counter() - start
        for micro_batch in there[: KEPT_MICRO_BATCHES // 2]:
            self(step, micro_batch)

    def __call__(self, step: int, micro_batch: int) -> MicroBatch:
        """Return the samples for (step, number of the micro-batch in the global batch of the step)."""
        return self._load(step, micro_batch)

    def bucket(self, step: int, micro_batch: int) -> int:
        """Return the number of the bucket of a micro-batch; the last one if all have one shape."""
        return -1 if self._buckets is None else self._bucket(step, micro_batch)

    def _found_bucket(self, step: int, micro_batch: int) -> int:
        assert self._buckets is not None
        return self._buckets.number_of(self(step, micro_batch).inputs)

    def _loaded(self, step: int, micro_batch: int) -> MicroBatch:
        start = perf_counter()
        read = self._source.read(step, micro_batch)
        require_padding_at_end(self._job, read.fields)
        if read.left_out or self._left_out:
            draws = self.draws(step, micro_batch)
            known = {row: "" for row, draw in enumerate(draws) if draw in self._left_out}
            for row in read.left_out.keys() - known:
                self._unread(step, draws[row], read.left_out[row])
            if known:
                read = MicroBatch.of(read.inputs, read.targets, {**read.left_out, **known})
        inputs, targets = (mapped(partial(copied_to_device, device=self._device), each) for each in read[:2])
        self.wait_s += perf_counter() - start
        return read._replace(inputs=inputs, targets=targets)

    def _reads_of(self, operations: Iterable[Operation]) -> list[int]:
        return list(dict.fromkeys(each.micro_batch for each in operations if needs_samples(each, self._job)))


def reads_samples(operation: Operation, job: Job) -> bool:
    """Return whether samples are read for an operation: for layer 0, as fields, for the loss, or for its terms."""
    if operation.kind is not OperationKind.FORWARD:
        return False
    if operation.last or uses_inputs(operation, job):
        return True
    return bool(job.side_outputs) and any(AUXILIARY in job.side_outputs[layer] for layer in operation.layers)


def needs_samples(operation: Operation, job: Job) -> bool:
    """Return whether a worker needs the samples of an operation, if only because messages have their length."""
    return buckets_of(job) is not None or reads_samples(operation, job)


def uses_inputs(operation: Operation, job: Job) -> bool:
    """Return whether layers of an operation use the inputs of the micro-batch: layer 0, and those with fields."""
    return operation.first or any(map(job.keywords, operation.layers))
