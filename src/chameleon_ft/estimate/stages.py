"""A pipeline as the numbers that closed forms and bounds are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from chameleon_ft.plan import Hop, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, OperationKind, PipelineTimes

__all__ = ["PipelineTimes", "pipeline_times"]


def pipeline_times(
    hops: Sequence[Hop],
    costs: CostModel,
    *,
    split_backward: bool = False,
    recompute: Mapping[int, RecomputedLayers] = FrozenMap({}),
) -> PipelineTimes:
    """The times of a route's hops, each on its worker; `recompute` is that of the plan.

    Raises PlanError if there are no hops or layers are unknown.
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
