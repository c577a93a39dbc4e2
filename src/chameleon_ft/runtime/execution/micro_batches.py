"""Micro-batches of samples, read by the worker that needs them. Reading is no operation of a program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.config import Batch
from chameleon_ft.data.order import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job import Job

__all__ = ["KEPT_MICRO_BATCHES", "MicroBatches", "micro_batches_of"]

MicroBatches = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns (inputs, targets) for (step, number of the micro-batch in the global batch of the step)."""

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
    def load(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        first = step * batch.samples if first_sample is None else first_sample(step)
        described = f"of micro-batch {micro_batch} in step {step}"
        inputs, targets = load_micro_batch(
            job.dataset,
            order,
            first + micro_batch * size,
            size,
            reading=lambda index: reading(f"reading sample {index} {described}"),
        )
        return inputs.to(device), targets.to(device)

    return load
