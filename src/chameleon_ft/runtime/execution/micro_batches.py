"""Micro-batches of samples, read by the worker that needs them. Reading is no operation of a program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import xxhash
from torch import Tensor

from chameleon_ft.config import Batch
from chameleon_ft.data.order import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job import Job


class MicroBatch(NamedTuple):
    """The samples of a micro-batch, stacked: (micro-batch, ...).

    Attributes:
        digest: of the values of both tensors, as they were read: below 2**40, so that a float64 holds sums of many.
    """

    inputs: Tensor
    targets: Tensor
    digest: int = 0


MicroBatches = Callable[[int, int], MicroBatch]
"""Returns the samples for (step, number of the micro-batch in the global batch of the step)."""

KEPT_MICRO_BATCHES: Final = 64
"""The latest micro-batches stay loaded, because a hop reads its inputs, and later its targets, one by one."""


def micro_batches_of(
    job: Job,
    batch: Batch,
    *,
    seed: int,
    device: torch.device,
    first_sample: Callable[[int], int] | None = None,
    reading: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> MicroBatches:
    """Return a function that loads micro-batches of `job` onto `device`.

    Args:
        first_sample: returns the position of the first sample of a step; None: all steps from 0 on have this batch.
        reading: returns a context inside which the sample of this description is read.
    """
    order, size = SampleOrder(len(job.dataset), seed), batch.micro_batch_size

    @lru_cache(KEPT_MICRO_BATCHES)
    def load(step: int, micro_batch: int) -> MicroBatch:
        first = step * batch.samples if first_sample is None else first_sample(step)
        described = f"of micro-batch {micro_batch} in step {step}"
        inputs, targets = load_micro_batch(
            job.dataset,
            order,
            first + micro_batch * size,
            size,
            reading=lambda index: reading(f"reading sample {index} {described}"),
        )
        values = xxhash.xxh3_64()
        for tensor in (inputs, targets):
            values.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return MicroBatch(inputs.to(device), targets.to(device), values.intdigest() >> 24)

    return load
