"""How a model is executed: choices that change time and memory, but not the results beyond rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.presets._lookup import named
from chameleon_ft.presets.shape import ModelShape


class Attention(StrEnum):
    """The kernel of attention.

    Flash attention (Dao et al. 2022) keeps one number for each row of the scores and skips what a causal mask hides.
    Eager attention computes and keeps all scores.
    """

    FLASH = "flash"
    EAGER = "eager"


class Recompute(StrEnum):
    """Activations that are dropped after the forward and recomputed in the backward (Korthikanti et al. 2022).

    None; the core of attention (scores, softmax, dropout), which flash attention never keeps; or whole blocks, of which
    only the input is kept. This applies to all workers and all steps. A plan can also ask some of its workers to
    recompute whole blocks, or norms, activation functions and the core of attention: do not do both.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How the ranks of one worker execute a block.

    Attributes:
        attention: kernel of attention.
        recompute: what is computed twice to save memory.
        tp: ranks of a worker that share every block (tensor parallelism, Shoeybi et al. 2019).
        sequence_parallel: whether these ranks also share what tensor parallelism leaves whole: norms, dropout, and the
            inputs of the matrices. Without effect if `tp` is 1.

    Raises:
        ConfigError: `tp` below one.
    """

    attention: Attention = Attention.FLASH
    recompute: Recompute = Recompute.NONE
    tp: int = 1
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"tp must be at least 1; got {self.tp}")

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError unless `tp` ranks can share the heads and the feed-forward of `shape` equally."""
        for field in ("heads", "kv_heads", "ffn", "vocab"):
            if getattr(shape, field) % self.tp:
                raise ConfigError(
                    f"tp {self.tp} does not divide {field} {getattr(shape, field)} of {shape.name!r}; use a divisor"
                )

    @property
    def shared(self) -> int:
        """The number of ranks that share the bytes of norms, dropout and inputs of matrices."""
        return self.tp if self.sequence_parallel else 1


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
        name: name of the policy.
        parameters: type of the parameters, and of everything computed with them.
        gradients: type in which gradients are summed over micro-batches and workers.
        optimizer_bytes: bytes of the optimizer for each parameter: its moments, and a master copy if it keeps one.
        are_rounded: whether a worker rounds the parameters of a layer from their masters instead of receiving them.

    Raises:
        ConfigError: negative optimizer bytes.
    """

    name: str
    parameters: DType
    gradients: DType
    optimizer_bytes: int
    are_rounded: bool = False

    def __post_init__(self) -> None:
        if self.optimizer_bytes < 0:
            raise ConfigError(f"optimizer_bytes of {self.name!r} must not be negative; got {self.optimizer_bytes}")

    @property
    def master_bytes(self) -> int:
        """The bytes of a master copy for each parameter: parameters of 16 bits with more than two float32 moments."""
        return 4 if self.parameters.num_bytes == 2 and self.optimizer_bytes > 8 else 0


_BF16: Final = "bf16-master-fp32-gradients"

STATE_POLICIES: Final[Mapping[str, StatePolicy]] = FrozenMap(
    {
        name: StatePolicy(
            name=name,
            parameters=parameters,
            gradients=gradients,
            optimizer_bytes=optimizer_bytes,
            are_rounded=name == _BF16,
        )
        for name, parameters, gradients, optimizer_bytes in (
            # 2 + 2 + (4 master + 4 + 4 moments) = 16 bytes: Rajbhandari et al., "ZeRO", 2020, section 3.1.
            ("bf16-master", DType.BF16, DType.BF16, 12),
            # As above with gradients summed in fp32: 18 bytes, as a run in bf16 has them.
            (_BF16, DType.BF16, DType.FP32, 12),
            # PyTorch's AdamW for parameters in bf16: both moments in their type, no master copy.
            ("bf16", DType.BF16, DType.BF16, 4),
            ("fp32", DType.FP32, DType.FP32, 8),
        )
    }
)
"""Policies for Adam by name."""

PRECISIONS: Final[Mapping[str, str]] = FrozenMap({"fp32": "fp32", "bf16": _BF16})
"""The policy of a run by its precision."""


def state_policy(name: str) -> StatePolicy:
    """Return the policy of this name. Raises ConfigError if there is none."""
    return named(STATE_POLICIES, name, "state policy")
