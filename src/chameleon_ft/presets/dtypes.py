"""Element types, and what is kept of every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.presets._lookup import named

__all__ = ["STATE_POLICIES", "DType", "StatePolicy", "state_policy"]


class DType(StrEnum):
    """The type of an element of a tensor."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePolicy:
    """The types of parameters, gradients and optimizer state.

    Attributes:
        name: what it is called.
        parameters: type of the parameters, and of everything computed with them.
        gradients: type in which gradients are summed over micro-batches and workers.
        optimizer_bytes: bytes of the optimizer for each parameter: its moments, and a master copy if it keeps one.

    Raises:
        ConfigError: negative optimizer bytes.
    """

    name: str
    parameters: DType
    gradients: DType
    optimizer_bytes: int

    def __post_init__(self) -> None:
        if self.optimizer_bytes < 0:
            raise ConfigError(
                f"optimizer_bytes of policy {self.name!r} must not be negative; got {self.optimizer_bytes}"
            )

    @property
    def bytes_per_param(self) -> int:
        """Bytes of parameter, gradient and optimizer state together, for each parameter."""
        return self.parameters.num_bytes + self.gradients.num_bytes + self.optimizer_bytes


STATE_POLICIES: Final[Mapping[str, StatePolicy]] = FrozenMap(
    {
        policy.name: policy
        for policy in (
            # 2 + 2 + (4 master + 4 + 4 moments) = 16 bytes: Rajbhandari et al., "ZeRO", 2020, section 3.1.
            StatePolicy(name="bf16-master", parameters=DType.BF16, gradients=DType.BF16, optimizer_bytes=12),
            # As above with gradients summed in fp32: 18 bytes.
            StatePolicy(
                name="bf16-master-fp32-gradients", parameters=DType.BF16, gradients=DType.FP32, optimizer_bytes=12
            ),
            # What PyTorch's AdamW keeps for parameters in bf16: both moments in their type, no master copy.
            StatePolicy(name="bf16", parameters=DType.BF16, gradients=DType.BF16, optimizer_bytes=4),
            StatePolicy(name="fp32", parameters=DType.FP32, gradients=DType.FP32, optimizer_bytes=8),
        )
    }
)
"""Policies for Adam by name."""


def state_policy(name: str) -> StatePolicy:
    """The policy of this name. Raises ConfigError if there is none."""
    return named(STATE_POLICIES, name, "state policy")
