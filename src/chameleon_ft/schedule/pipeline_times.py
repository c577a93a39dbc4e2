"""A pipeline as numbers: how long each stage computes, and how long messages between stages take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.placement import RecomputedLayers
from chameleon_ft.plan.plan import Hop
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.program import OperationKind

__all__ = ["PipelineTimes", "pipeline_times"]


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


def pipeline_times(
    hops: Sequence[Hop],
    costs: CostModel,
    *,
    split_backward: bool = False,
    recompute: Mapping[int, RecomputedLayers] = FrozenMap({}),
) -> PipelineTimes:
    """The times of a route's hops, each on its worker; `recompute` is that of the plan.

    Raises:
        PlanError: no hops, or unknown layers.
        ConfigError: the cluster lacks a worker.
    """

    def times_s(kind: OperationKind) -> tuple[float, ...]:
        return tuple(costs.compute_s(hop.worker, kind, hop.layers, recompute=recompute.get(hop.worker)) for hop in hops)

    return PipelineTimes(
        forward_s=times_s(OperationKind.FORWARD),
        backward_s=times_s(OperationKind.INPUT_GRAD if split_backward else OperationKind.BACKWARD),
        weight_grad_s=times_s(OperationKind.WEIGHT_GRAD) if split_backward else (0.0,) * len(hops),
        message_s=tuple(
            costs.message_s(hop.worker, after.worker, costs.message_bytes(hop.layers.stop - 1))
            for hop, after in pairwise(hops)
        ),
    )
