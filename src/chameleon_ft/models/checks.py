"""Checks of the functions of a job by one call each, before any worker is started."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.models.build import generator_lock
from chameleon_ft.models.precision import loss_of

__all__ = ["check_learning_rate", "check_loss"]


def check_loss(job: Job, output: BoundarySpec, micro_batch_size: int, *, device: torch.device) -> None:
    """Compute the loss of one micro-batch, of random numbers as the output of the last layer.

    Raises:
        ConfigError: `loss` or `loss_terms` cannot be called, or returns something else than it should.
    """
    _, targets = load_micro_batch(job.dataset, [index % len(job.dataset) for index in range(micro_batch_size)])
    targets = targets.to(device)
    with generator_lock, torch.random.fork_rng(devices=[]):
        made = torch.rand(output.shape).to(device=device, dtype=output.dtype)
        made.requires_grad_(made.is_floating_point() or made.is_complex())
        try:
            loss: Any = loss_of(job, made, targets)
            terms: Any = job.loss_terms(targets)
        except Exception as error:
            raise ConfigError(
                f"the loss of an output of shape {output.shape} and targets of shape {tuple(targets.shape)} cannot be "
                f"computed ({type(error).__name__}: {error}); check that `loss` takes the output of the last layer and "
                "the stacked targets, and `loss_terms` the targets"
            ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"`loss` returned {found}: it returns the sum of the loss terms of a micro-batch, a tensor of one number; "
            'give torch\'s losses reduction="sum"'
        )
    if not loss.requires_grad:
        raise ConfigError(
            "`loss` returned a number that has no gradient by the output of the last layer, so nothing would be "
            "trained; compute it from the output, without detach() or no_grad()"
        )
    try:
        is_count = math.isfinite(terms) and int(terms) >= 0
    except (TypeError, ValueError, RuntimeError):
        is_count = False
    if not is_count:
        raise ConfigError(
            f"`loss_terms` returned {terms!r:.60}: it returns how many terms `loss` sums, a whole number, or a tensor "
            "of one"
        )


def check_learning_rate(job: Job) -> None:
    """Call `learning_rate` for the first step. Raises ConfigError unless it returns a rate."""
    if job.learning_rate is None:
        return
    rate: Any = job.learning_rate(0)
    try:
        is_rate = math.isfinite(rate) and rate >= 0
    except (TypeError, ValueError, RuntimeError):
        is_rate = False
    if not is_rate:
        raise ConfigError(
            f"`learning_rate` returned {rate!r:.60} for step 0: it returns the rate, a number of 0 or more"
        )
