"""The optimizer of a Llama, and learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["adamw", "rate_shares", "warmup_cosine"]


def adamw(
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) that decays matrices and larger tensors, but not vectors.

    The state is per parameter (``step``, ``exp_avg``, ``exp_avg_sq``), so that a layer can move between workers with
    it. `parameters` may be empty, for a layer without any.
    """
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=lr,
        betas=betas,
        eps=eps,
        # On the CPU too, where it takes 0.4 times as long as the alternatives for a worker's share of a small Llama.
        fused=True,
    )


def warmup_cosine(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 0): linear up to `peak`, then half a cosine down to `floor`.

    Step ``warmup_steps - 1`` is the first at `peak`; step ``total_steps - 1`` and all later ones are at `floor`. A
    warm-up as long as the run, or longer, never decays.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = total_steps - warmup_steps
    progress = min(1.0, (step - warmup_steps + 1) / decay_steps) if decay_steps > 0 else 1.0
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def rate_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return, for each group of an optimizer, its learning rate as a multiple of `Job.learning_rate`.

    The groups keep the ratio of the rates that they were made with, as by torch's LambdaLR. The multiple is 1 for the
    optimizer's default rate, or if no group has that, for the largest rate of a group.
    """
    default = float(optimizer.defaults.get("lr", 0.0))
    rates = [float(group.get("initial_lr", group.get("lr", default))) for group in optimizer.param_groups]
    used = [rate for rate, group in zip(rates, optimizer.param_groups, strict=True) if group["params"]]
    base = default if default > 0 and default in used else max(used, default=default)
    return [1.0 if rate == base else rate / base for rate in rates]
