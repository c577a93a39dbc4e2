"""From sample ids to the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from chameleon_ft.job import Dataset, TensorPair

__all__ = ["load_micro_batch"]


def load_micro_batch(dataset: Dataset, ids: Sequence[int]) -> TensorPair:
    """The samples `ids` of `dataset` as (inputs, targets), stacked along a new first dimension."""
    samples = [dataset[index] for index in ids]
    return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
