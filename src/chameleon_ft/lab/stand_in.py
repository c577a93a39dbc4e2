"""The job of emulated devices: as many layers as a profile has, with tensors reduced in size by one factor.

An emulated run executes the real system, with real messages, reductions, commits and checkpoints; only the layers
compute almost nothing, and operations and messages last as long as the profile says.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from chameleon_ft.cost.profile import Profile
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.optim import adamw
from chameleon_ft.storage.profiles import read_profile

if TYPE_CHECKING:
    from chameleon_ft.config import RunConfig

# Upper limits of a layer of the stand-in.
_BOUNDARY_BYTES: Final = 4096
_GRADIENT_BYTES: Final = 65536
_GRADIENT_ELEMENT_BYTES: Final = 4
_ACTIVATION_ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2}
_SAMPLES: Final = 1 << 16


def stand_in(config: RunConfig) -> Job:
    """Return the stand-in for the model of ``config.profile``. Raises ConfigError if there is none, or ProfileError."""
    if config.profile is None:
        raise ConfigError("the stand-in for a model is made of its profile; set profile")
    profile = read_profile(config.profile)
    # Bytes of the model for one element of the stand-in.
    gradient_bytes = stand_in_scale(profile) * _GRADIENT_ELEMENT_BYTES
    activation_bytes = stand_in_scale(profile) * _ACTIVATION_ELEMENT_BYTES[config.precision]
    width_bytes = activation_bytes * profile.fingerprint.micro_batch_size
    return Job(
        layers=[
            partial(
                _Layer,
                num_params=math.ceil(layer.gradient_bytes / gradient_bytes),
                width=max(1, round(layer.output_bytes / width_bytes)),
            )
            for layer in profile.layers
        ],
        loss=lambda output, target: ((output.mean(dim=-1, keepdim=True) - target) ** 2).sum(),
        dataset=_Numbers(),
        optimizer=partial(adamw, lr=1e-3, weight_decay=0.0),
        layer_costs=profile.relative_costs,
    )


def stand_in_scale(profile: Profile) -> int:
    """Return how many bytes of the model one byte stands for, in all messages and reductions."""
    return max(
        1,
        *(math.ceil(layer.output_bytes / _BOUNDARY_BYTES) for layer in profile.layers),
        *(math.ceil(layer.gradient_bytes / _GRADIENT_BYTES) for layer in profile.layers),
    )


class _Layer(nn.Module):
    """(n, any) -> (n, width): the mean of the input plus the mean of tanh(parameters)."""

    def __init__(self, num_params: int, width: int) -> None:
        super().__init__()
        self._width = width
        # A layer without gradients in the profile has none to reduce here.
        self.weight = nn.Parameter(torch.empty(num_params).uniform_(-1, 1)) if num_params else None

    def forward(self, boundary: Tensor) -> Tensor:
        output = boundary.mean(dim=-1, keepdim=True)
        if self.weight is not None:
            output = output + torch.tanh(self.weight).mean()
        return output.expand(-1, self._width).contiguous()


class _Numbers:
    """A map-style dataset of pairs (x, 2 - x).

    Layers that add a number to x cannot learn it: the loss depends on the samples, and stays far from zero, where
    rounding errors would be large in comparison.
    """

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        number = torch.tensor([index / _SAMPLES])
        return number, 2 - number
