"""Small jobs for tests of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chameleon_ft.config import LlamaConfig
from chameleon_ft.job.job import Job
from chameleon_ft.models.llama import llama_layers, next_token_loss

CONFIG = LlamaConfig(
    vocab_size=50, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, seq_len=8, dropout=0.5
)


class Zeros:
    """Samples of one shape and type, as input and target."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self._sample = torch.zeros(shape, dtype=dtype)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._sample, self._sample


def make_job(layers: Sequence[Callable[[], nn.Module]], dataset: Zeros, **fields: Any) -> Job:
    return Job(layers=layers, loss=next_token_loss, dataset=dataset, optimizer=torch.optim.SGD, **fields)


LLAMA = make_job(llama_layers(CONFIG), Zeros(8, dtype=torch.int64))
