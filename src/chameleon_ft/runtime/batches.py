"""The samples of each micro-batch, a function of (seed, step)."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from chameleon_ft.config import Batch
from chameleon_ft.data.order import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job import Job

__all__ = ["KEPT_MICRO_BATCHES", "Batches"]

KEPT_MICRO_BATCHES = 64
"""The latest ones stay loaded: a hop's inputs and its route's targets are asked for one after the other."""


class Batches:
    """Loads the micro-batches that this rank reads inputs or targets of, onto its device."""

    def __init__(self, job: Job, batch: Batch, *, seed: int, device: torch.device) -> None:
        self._dataset = job.dataset
        self._order = SampleOrder(len(job.dataset), seed)
        self._batch = batch
        self._device = device
        self._loaded: OrderedDict[tuple[int, int], tuple[Tensor, Tensor]] = OrderedDict()

    def micro_batch(self, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of micro-batch `micro_batch` of the global batch of `step`."""
        key = (step, micro_batch)
        if key not in self._loaded:
            size = self._batch.micro_batch_size
            ids = self._order.ids(step, self._batch.samples)[micro_batch * size : (micro_batch + 1) * size]
            inputs, targets = load_micro_batch(self._dataset, ids)
            self._loaded[key] = (inputs.to(self._device), targets.to(self._device))
            while len(self._loaded) > KEPT_MICRO_BATCHES:
                self._loaded.popitem(last=False)
        return self._loaded[key]
