"""How blocks are executed: choices that change time and memory, but not what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from chameleon_ft.errors import ConfigError
from chameleon_ft.presets.shape import ModelShape

__all__ = ["Attention", "Execution", "Recompute"]


class Attention(StrEnum):
    """How attention is computed.

    Flash attention (Dao et al. 2022) keeps one number for each row of the scores and skips what a causal mask hides.
    Eager attention computes and keeps all scores.
    """

    FLASH = "flash"
    EAGER = "eager"


class Recompute(StrEnum):
    """What is dropped after the forward and computed again in the backward (Korthikanti et al. 2022).

    Nothing; the core of attention (scores, softmax, dropout), which flash attention never keeps; or whole blocks, of
    which only the input is kept. Here it is for all workers and all steps. A plan can also ask some of its workers to
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
        sequence_parallel: whether these ranks also share what tensor parallelism leaves to each of them: norms,
            dropout, and the inputs of the matrices. Without effect if `tp` is 1.

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
        """Raises ConfigError unless `tp` ranks can share the heads and the feed-forward of `shape` equally."""
        for field in ("heads", "kv_heads", "ffn", "vocab"):
            if getattr(shape, field) % self.tp:
                raise ConfigError(
                    f"tp {self.tp} does not divide {field} {getattr(shape, field)} of {shape.name!r}; use a divisor"
                )

    @property
    def shared(self) -> int:
        """By how many the bytes of norms, dropout and inputs of matrices are divided on a rank."""
        return self.tp if self.sequence_parallel else 1
