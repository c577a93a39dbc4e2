"""Shared parts of the ranks that train with torch or torchft alone: their configuration and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from chameleon_ft.config import TrainConfig, load_config


def rank_config(path: Path, *, out: Path) -> TrainConfig:
    """Read the configuration of a rank, with `out` as its directory."""
    config = load_config(path)
    if not isinstance(config, TrainConfig):
        raise SystemExit(f"--config {path}: is not of a Llama")
    return config.model_copy(update={"output_dir": out})


def flat_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a buffer of zeros with views as the gradients of all parameters."""
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    attach_gradients(buffer, parameters)
    return buffer


def attach_gradients(buffer: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Make every parameter's gradient a view into `buffer`."""
    parts = buffer.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
