"""The job of `chameleon train`: a Llama on tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from chameleon_ft.data.corpus import load_tokens
from chameleon_ft.data.samples import TokenWindows
from chameleon_ft.job import Job
from chameleon_ft.models.llama import layer_flops, llama_layers, next_token_loss, tied_parameters
from chameleon_ft.optim import adamw, warmup_cosine

if TYPE_CHECKING:
    from chameleon_ft.config import TrainConfig


def llama_job(config: TrainConfig) -> Job:
    """Return the job of ``config.model`` on the data prepared in ``config.output_dir`` (see `load_tokens`).

    Raises:
        DataError: the data cannot be used.
    """
    optimizer = config.optimizer
    return Job(
        layers=llama_layers(config.model),
        loss=next_token_loss,
        loss_terms=Tensor.numel,
        dataset=TokenWindows(load_tokens(config), config.model.seq_len),
        optimizer=partial(
            adamw,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        ),
        learning_rate=partial(
            warmup_cosine,
            peak=optimizer.lr,
            floor=optimizer.min_lr,
            warmup_steps=optimizer.warmup_steps,
            total_steps=config.steps,
        ),
        clip_norm=optimizer.clip_norm or None,
        layer_costs=layer_flops(config.model),
        tied=tied_parameters(config.model),
    )
