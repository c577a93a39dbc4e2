"""Layouts that follow from the number of live workers alone, without a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import PipelineLayout, Plan, data_pipeline_plan, pipelines_plan, split_layers
from chameleon_ft.schedule import InFlightLimit


def largest_symmetric_layout(
    *,
    live: Sequence[int],
    layer_costs: Sequence[float],
    micro_batches: int,
    preferred_pp: int,
    split_backward: bool = False,
) -> Plan:
    """Return the pipelines of equal depth and equal share of the micro-batches that use most of the live workers.

    Among layouts that use equally many, the depth is the nearest to `preferred_pp`, and of two as near the smaller. The
    first workers of `live` are used; some may be left over, since the number of pipelines must divide `micro_batches`
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


def replicated_layout(
    *,
    workers: Sequence[int],
    layer_costs: Sequence[float],
    micro_batches: int,
    copies: int,
    split_backward: bool = False,
) -> Plan:
    """Return `copies` pipelines side by side, so that every layer has as many holders.

    Neighbours in `workers` form a pipeline, with depths that differ by one at most and shares of the micro-batches in
    proportion. Pipelines are not deeper than there are layers; the workers that are left over are the last ones.

    Raises:
        PlanError: fewer workers or micro-batches than copies, or no copies at all.
    """
    if not 1 <= copies <= min(len(workers), micro_batches):
        raise PlanError(f"{copies} copies need as many workers and micro-batches; got {len(workers)}, {micro_batches}")
    used = min(len(workers), copies * len(layer_costs))
    pipelines: list[PipelineLayout] = []
    for start, stop in pairwise(used * number // copies for number in range(copies + 1)):
        cut_points = tuple(layers.stop for layers in split_layers(layer_costs, stop - start))
        # One micro-batch each, and the others in proportion.
        share = 1 + (micro_batches - copies) * stop // used - (micro_batches - copies) * start // used
        pipelines.append(PipelineLayout(cut_points, tuple(workers[start:stop]), share))
    return pipelines_plan(pipelines, split_backward=split_backward)


def uniform_limits(workers: Iterable[int], depth: int) -> Mapping[int, InFlightLimit]:
    """Return limits for any plan: each worker keeps as many micro-batches as the first stage of 1F1B at this depth."""
    return dict.fromkeys(workers, InFlightLimit(depth, depth))
