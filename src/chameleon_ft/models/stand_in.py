"""The job of emulated devices: a model of as many layers as a profile has, every tensor of it the same small part.

An emulated run is one of the real system, with real messages, reductions, commits and checkpoints; only what the layers
compute is next to nothing, and operations and messages are made to last as long as the profile says.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job import Job
from chameleon_ft.optim import adamw
from chameleon_ft.profiles import Profile, read_profile

if TYPE_CHECKING:
    from chameleon_ft.config import RunConfig

__all__ = ["stand_in", "stand_in_scale"]

# The most that a stand-in has of each.
_BOUNDARY_BYTES: Final = 4096
_GRADIENT_BYTES: Final = 65536
_ELEMENT_BYTES: Final = 4
_SAMPLES: Final = 1 << 16
_LEARNING_RATE: Final = 1e-3


def stand_in(config: RunConfig) -> Job:
    """The job that stands in for the model of ``config.profile``.

    Raises:
        ConfigError: there is no profile; or ProfileError, it cannot be read.
    """
    if config.profile is None:
        raise ConfigError("the stand-in for a model is made of its profile; set profile")
    profile = read_profile(config.profile)
    scale = stand_in_scale(profile)
    share = scale * _ELEMENT_BYTES
    widths = [
        max(1, round(layer.output_bytes / (share * profile.fingerprint.micro_batch_size))) for layer in profile.layers
    ]
    params = [math.ceil(layer.gradient_bytes / share) for layer in profile.layers]
    return Job(
        layers=[partial(_Layer, *sizes) for sizes in zip(params, widths, strict=True)],
        loss=_squared_error,
        dataset=_Numbers(),
        optimizer=partial(adamw, lr=_LEARNING_RATE, weight_decay=0.0),
        layer_costs=profile.relative_costs,
    )


def stand_in_scale(profile: Profile) -> int:
    """How many bytes one byte stands for, in every tensor that crosses to another worker or is reduced."""
    return max(
        1,
        *(math.ceil(layer.output_bytes / _BOUNDARY_BYTES) for layer in profile.layers),
        *(math.ceil(layer.gradient_bytes / _GRADIENT_BYTES) for layer in profile.layers),
    )


class _Layer(nn.Module):
    """(n, any) -> (n, width): the mean of what comes in, moved by the mean of the parameters."""

    def __init__(self, params: int, width: int) -> None:
        super().__init__()
        self._width = width
        # What has no gradients in the profile has none to reduce here.
        self.weight = nn.Parameter(torch.empty(params).uniform_(-1, 1)) if params else None

    def forward(self, boundary: Tensor) -> Tensor:
        moved = boundary.mean(dim=-1, keepdim=True)
        if self.weight is not None:
            moved = moved + torch.tanh(self.weight).mean()
        return moved.expand(-1, self._width).contiguous()


class _Numbers:
    """A map-style dataset: a number, and the one that comes of it."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        number = torch.tensor([index / _SAMPLES])
        return number, number + 1


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output.mean(dim=-1, keepdim=True) - target) ** 2).sum()
