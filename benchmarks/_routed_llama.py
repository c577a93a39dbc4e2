"""The built-in Llama with a router after each block, which has auxiliary losses, metrics and sums over the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from chameleon_ft import auxiliary_loss, log
from chameleon_ft.config import TrainConfig
from chameleon_ft.job import Job
from chameleon_ft.models.llama import llama_job

_EXPERTS = 4


class _Routed(nn.Module):
    """A block, and a router after it with an auxiliary loss, and with biases that follow sums over the step.

    All is continuous, so rounding changes no choice.
    """

    step_sums = ("mass", "tokens")
    mass: Tensor
    tokens: Tensor
    bias: Tensor

    def __init__(self, block: Callable[[], nn.Module], dim: int) -> None:
        super().__init__()
        self.block = block()
        self.router = nn.Linear(dim, _EXPERTS, bias=False)
        self.values = nn.Parameter(torch.randn(_EXPERTS, dim) / dim)
        self.register_buffer("mass", torch.zeros(_EXPERTS), persistent=False)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        shares = (self.router(x) + self.bias).softmax(-1)
        loads = shares.flatten(0, -2).float()
        self.mass += loads.detach().sum(0)
        self.tokens += len(loads)
        auxiliary_loss(0.1 * loads.mean(0).square().sum(), terms=1)
        auxiliary_loss(1e-3 * loads.square().sum())
        log("largest_load", loads.mean(0).max())
        routed: Tensor = shares @ self.values
        return x + routed

    def after_step(self, sums: Mapping[str, Tensor]) -> None:
        self.bias += 0.1 * (1 / _EXPERTS - sums["mass"] / sums["tokens"])


def job(config: TrainConfig) -> Job:
    """Return the job of the built-in Llama with a router after each block."""
    own = llama_job(config)
    first, *blocks, last = own.layers
    routed = [partial(_Routed, block, config.model.dim) for block in blocks]
    return replace(own, layers=[first, *routed, last], weights=None)
