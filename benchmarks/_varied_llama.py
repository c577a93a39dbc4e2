"""The built-in Llama with frozen layers, an optimizer and a schedule that are drawn by the seed of the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from chameleon_ft.config import TrainConfig
from chameleon_ft.job import Job, ModelParameters
from chameleon_ft.models.llama import llama_job
from chameleon_ft.optim import NO_DECAY, combined, cosine, ema, groups, matrices, scheduler, vectors, wsd

_RATE = 1e-3


def _by_name(own: ModelParameters) -> torch.optim.Optimizer:
    made = groups(own, {vectors: NO_DECAY, "*.attention.*": {"lr": 3 * _RATE}, "*.output.weight": {"lr": 2 * _RATE}})
    return torch.optim.AdamW(made, lr=_RATE, weight_decay=0.1)


def _of_matrices(own: ModelParameters) -> torch.optim.Optimizer:
    # Muon rounds to bfloat16, so it would make more of sums in another order than the tolerance allows.
    others = partial(torch.optim.AdamW, lr=_RATE)
    return combined(own, {"0.*": others, matrices: partial(torch.optim.Adafactor, lr=_RATE), "*": others})


def _averaged(own: ModelParameters) -> torch.optim.Optimizer:
    return ema(torch.optim.AdamW(own.named_parameters(), lr=_RATE), 0.9)


def _frozen(factory: Callable[[], nn.Module]) -> nn.Module:
    return factory().requires_grad_(False)


def job(config: TrainConfig) -> Job:
    """Return the job of the built-in Llama, varied by the seed of the run."""
    own, drawn, steps = llama_job(config), random.Random(config.seed), config.steps
    last = own.num_layers - 1
    first_trained = drawn.choice([0, 0, 1, last // 2, last])
    frozen = {*range(first_trained), *(layer for layer in range(1, last) if drawn.random() < 0.2)}
    schedules: list[Any] = [
        cosine(total_steps=steps, warmup_steps=2),
        wsd(total_steps=steps, decay_steps=steps // 2),
        scheduler(lr_scheduler.ExponentialLR, gamma=0.9),
        lambda step: 1 / (1 + step),
    ]
    return replace(
        own,
        layers=[partial(_frozen, each) if layer in frozen else each for layer, each in enumerate(own.layers)],
        optimizer=drawn.choice([_by_name, _of_matrices, _averaged]),
        learning_rate=None,
        schedule=drawn.choice(schedules),
        clip_value=drawn.choice([None, 0.01]),
    )
