"""Small jobs whose layers are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from chameleon_ft.config import Batch, LlamaConfig, RunConfig
from chameleon_ft.job.computation import Precision
from chameleon_ft.job.job import Job
from chameleon_ft.models.llama import Block, Embedding, Head, next_token_loss
from chameleon_ft.plan import LayerRange
from chameleon_ft.worker.profiling.layers import ModelOnDevice, ResidentLayers, sized_layer
from chameleon_ft.workload import LayerCost

CPU = torch.device("cpu")
WIDTH, ROWS, SAMPLES, FLOAT = 64, 32, 8, 4
BETWEEN = SAMPLES * ROWS * WIDTH * FLOAT
"""Bytes of what crosses between two layers of `job_of`."""
LLAMA = LlamaConfig(vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, seq_len=16)


class Matrices:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((ROWS, WIDTH), float(index)), torch.zeros(ROWS, WIDTH)


class Sentences:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(index, index + LLAMA.seq_len) % LLAMA.vocab_size
        return ids, ids


def square_sum(output: Tensor, target: Tensor) -> Tensor:
    # Not torch's own: its scalar keeps the memory of all the terms that it is the sum of.
    return (output - target).square().sum()


def job_of(layers: Sequence[Callable[[], nn.Module]]) -> Job:
    return Job(
        layers=layers,
        loss=square_sum,
        dataset=Matrices(),
        optimizer=partial(torch.optim.AdamW, fused=True),
    )


def llama_job() -> Job:
    block = partial(Block, LLAMA)
    return Job(
        layers=[partial(Embedding, LLAMA), block, block, partial(Head, LLAMA)],
        loss=next_token_loss,
        dataset=Sentences(),
        optimizer=partial(torch.optim.AdamW, fused=True),
    )


def on_device(job: Job, *, samples: int = SAMPLES) -> ModelOnDevice:
    return ModelOnDevice(job, RunConfig(batch=Batch(micro_batch_size=samples)), CPU)


def bytes_of(job: Job, layer: int, *, samples: int = SAMPLES) -> LayerCost:
    return sized_layer(ResidentLayers(on_device(job, samples=samples), LayerRange(layer, layer + 1)))


def in_bf16(job: Job) -> Job:
    return dataclasses.replace(job, precision=Precision("bf16", RunConfig().fp32_modules))
