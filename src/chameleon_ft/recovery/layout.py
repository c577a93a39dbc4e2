"""The layout to go on with when no live worker holds some layer, and everything is read from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.layouts import data_pipeline_plan
from chameleon_ft.plan.plan import Plan
from chameleon_ft.schedule import InFlightLimit

__all__ = ["in_flight_ceiling", "largest_symmetric_layout"]


def largest_symmetric_layout(
    *,
    live: Sequence[int],
    layer_costs: Sequence[float],
    micro_batches: int,
    preferred_pp: int,
    split_backward: bool = False,
) -> Plan:
    """The pipelines of equal depth and equal share of the micro-batches that use most of the live workers.

    Among layouts that use equally many, the depth nearest to `preferred_pp`, and of two as near the smaller. The first
    workers of `live` are used; there may be some left over, since the number of pipelines must divide `micro_batches`
    and a pipeline cannot have more stages than layers.

    Raises:
        PlanError: no live worker, no layers, or no micro-batches.
    """
    if not live:
        raise PlanError("no worker is live; start at least one")
    if not layer_costs or micro_batches < 1:
        raise PlanError(f"a layout needs layers and micro-batches; got {len(layer_costs)} and {micro_batches}")
    shapes = [
        (dp, pp)
        for dp in range(1, min(len(live), micro_batches) + 1)
        if micro_batches % dp == 0
        for pp in range(1, min(len(live) // dp, len(layer_costs)) + 1)
    ]
    dp, pp = min(shapes, key=lambda shape: (-shape[0] * shape[1], abs(shape[1] - preferred_pp), shape[1]))
    return data_pipeline_plan(
        layer_costs=layer_costs,
        dp=dp,
        pp=pp,
        micro_batches=micro_batches,
        workers=tuple(live)[: dp * pp],
        split_backward=split_backward,
    )


def in_flight_ceiling(workers: Iterable[int], depth: int) -> Mapping[int, InFlightLimit]:
    """What workers may keep whatever is planned: as many micro-batches as the first stage of 1F1B at this depth."""
    return dict.fromkeys(workers, InFlightLimit(depth, depth))
