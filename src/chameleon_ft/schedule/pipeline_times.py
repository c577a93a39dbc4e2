"""A pipeline as numbers: how long each stage computes, and how long messages between stages take."""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_ft.errors import PlanError

__all__ = ["PipelineTimes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Seconds of each stage of a pipeline, first to last, for one micro-batch.

    Attributes:
        forward_s: of F at each stage (f).
        backward_s: of B, or with split backward of I (b).
        weight_grad_s: of W (w); zeros with fused backward.
        message_s: one way between a stage and the next (c); one fewer than there are stages.

    Raises:
        PlanError: no stages, or lists whose lengths do not fit.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    message_s: tuple[float, ...]

    def __post_init__(self) -> None:
        depth = len(self.forward_s)
        if depth < 1 or (len(self.backward_s), len(self.weight_grad_s), len(self.message_s)) != (
            depth,
            depth,
            depth - 1,
        ):
            raise PlanError(
                "a pipeline of p stages needs p forward, backward and weight-gradient times and p - 1 message times; "
                f"got {depth}, {len(self.backward_s)}, {len(self.weight_grad_s)} and {len(self.message_s)}"
            )

    @property
    def depth(self) -> int:
        """Stages (p)."""
        return len(self.forward_s)
