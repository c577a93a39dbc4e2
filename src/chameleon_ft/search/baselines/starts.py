"""Equal pipelines to begin with, of each depth that the workers allow."""

from __future__ import annotations

import math

from chameleon_ft.plan import split_layers
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.baselines.layouts import Layout, fastest_layout
from chameleon_ft.search.result import FoundPlan

__all__ = ["equal_layouts"]

# So that there is a choice of depths where the number of workers is a prime, some workers stay idle.
_LEAST_DEPTHS = 2


def equal_layouts(costs: CostModel, *, split_backward: bool) -> list[FoundPlan]:
    """The fastest plan of equal pipelines for each depth that fits the memory, the shallowest first.

    A policy that never changes the depth of its pipelines depends on the depth that it begins with, and that which is
    fastest is not always that which is best with detours. Pipelines of one depth use up the workers; if fewer than two
    such depths fit, one worker stays idle, and so on. Workers recompute activations where that is faster or where
    nothing else fits, and backward is fused where split backward does not fit. Shares of the micro-batches differ by
    one at most.

    Args:
        costs: what is to be computed, and the live workers.
        split_backward: whether plans run our programs with split backward, and not 1F1B.
    """
    found: dict[int, FoundPlan] = {}
    for used in range(len(costs.cluster.workers), 0, -1):
        for depth in range(1, min(used, len(costs.workload.layers)) + 1):
            if used % depth == 0 and depth not in found and used // depth <= costs.workload.micro_batches:
                plan = _fastest(depth, used // depth, costs, split_backward=split_backward)
                if plan is not None:
                    found[depth] = plan
        if len(found) >= _LEAST_DEPTHS:
            break
    return [found[depth] for depth in sorted(found)]


def _fastest(depth: int, pipelines: int, costs: CostModel, *, split_backward: bool) -> FoundPlan | None:
    layouts: list[Layout] = []
    for recompute in (False, True):
        layers = (costs.workload.recomputed() if recompute else costs.workload).layers
        stages = split_layers([layer.forward_s + layer.backward_s for layer in layers], depth)
        cut_points = tuple(stage.stop for stage in stages)
        least, left = divmod(costs.workload.micro_batches, pipelines)
        shares = [least + (number < left) for number in range(pipelines)]
        layouts.append(Layout(tuple((cut_points, share) for share in shares), recompute, math.nan))
    for split in (True, False) if split_backward else (False,):
        chosen = fastest_layout(f"{pipelines} x {depth}", layouts, costs, split_backward=split, current=None)
        if chosen is not None:
            return chosen.found
    return None
