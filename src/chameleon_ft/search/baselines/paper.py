"""The search of the Chameleon paper (arXiv 2508.21613), to be compared with `find_plan`."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from chameleon_ft.cost.paper import pipeline_step_s
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.quantities import SUM_ROUNDING
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.baselines.min_mix import LeastMix
from chameleon_ft.search.baselines.planned_layouts import (
    BaselinePlan,
    CutPoints,
    Layout,
    OneFOneBMemory,
    fastest_layout,
    memory_of,
)


def paper_plan(
    costs: CostModel, *, split_backward: bool = False, current: Placement | None = None
) -> BaselinePlan | None:
    """Return the pipelines that the paper's search chooses for all workers; None if it finds none that fit.

    The paper's, as it is reported: for each number of pipelines, every partition of the workers
    into depths; micro-batches by the floor of the proportional share, then every placement of the remainder; layers
    equally, then every placement of the remainder; what L_i (m_p + m_g + m_opt) + (N_pp - i) L_i m_act does not let
    fit is dropped; the least time by dynamic programming over 1F1B (`estimate.paper.unequal_step_s`) is chosen. Workers
    are equal in it, messages and gradient sync free.

    Ours: a remainder may be placed on one stage or pipeline as a whole, too. Layers may be unequal: what they need is
    added up, and an operation's overhead is part of its time. No pipeline goes without micro-batches, and what 1F1B
    would not fit by our own count of memory is dropped as well. Where workers are unequal, the smallest memory counts.
    Of mixes of equal time, two with the fewest and two with the most pipelines are replayed. Several placements on
    hosts are tried, and the fastest plan is taken. Programs are 1F1B, or by `best_program` with split backward. Depths
    are bounded by the layers. Neither partitions nor placements are listed one by one: equal depths have equal times,
    so a knapsack finds the best partition, and lower bounds rule out most placements of layers. The time is that of
    trying all.

    Args:
        costs: costs of the workload on the live workers.
        split_backward: whether the plan runs our programs with split backward, and not 1F1B; it does not change the
            choice.
        current: which layers the live workers hold now, for the bytes to move.

    Raises:
        PlanError: no worker is left.
    """
    workers, micro_batches = len(costs.cluster.workers), costs.workload.micro_batches
    if not workers:
        raise PlanError("no worker is left to plan for; start at least one")
    cuts = _equal_cuts(memory_of(costs, recompute=False))
    mixes = LeastMix(
        depths=range(1, min(workers, len(costs.workload.layers)) + 1),
        workers=workers,
        micro_batches=micro_batches,
        time_s=lambda depth, share: cuts.best(depth, share)[0],
        min_share=lambda depth: micro_batches * depth // workers,
    ).mixes()
    layouts = (
        Layout(tuple((cuts.best(*each)[1], each[1]) for each in mix.pipelines), False, mix.time_s) for mix in mixes
    )
    return fastest_layout("paper", layouts, costs, split_backward=split_backward, current=current)


class _EqualCuts:
    """Equal stages, but for the remainder, which is placed so that the paper's estimate is least."""

    def __init__(self, memory: OneFOneBMemory) -> None:
        workload, layers = memory.workload, memory.workload.layers
        self._num_layers = len(layers)
        self._overhead_s = workload.operation_overhead_s
        self._memory = memory
        self._forward = list(accumulate((layer.forward_s for layer in layers), initial=0.0))
        self._backward = list(accumulate((layer.backward_s for layer in layers), initial=0.0))
        self.best = cache(self._best)

    def _best(self, depth: int, micro_batches: int) -> tuple[float, CutPoints]:
        """Return the seconds and cut points of the best placement of the layers; infinite if none fits.

        Branch and bound over the stages, the most promising next stage first.
        """
        share, spare = divmod(self._num_layers, depth)
        best: tuple[float, CutPoints] = (math.inf, ())

        def nexts(position: int, start: int) -> list[tuple[float, int]]:
            """Return lower bounds with each possible stop of the stage, the least first."""
            left = spare - (start - position * share)
            stops = range(start + share, start + share + left + 1)
            return sorted((max(bound_s(position, start, stop), rest_s(position + 1, stop)), stop) for stop in stops)

        @cache
        def bound_s(position: int, start: int, stop: int) -> float:
            return self._bound_s(depth, micro_batches, position, start, stop)

        @cache
        def rest_s(position: int, start: int) -> float:
            """Return a lower bound of any placement from here on."""
            if position == depth:
                return 0.0 if start == self._num_layers else math.inf
            return nexts(position, start)[0][0]

        def visit(taken: CutPoints, start: int) -> None:
            nonlocal best
            if len(taken) == depth:
                stages = [self._stage_s(*stage) for stage in pairwise((0, *taken))]
                forward_s, backward_s = zip(*stages, strict=True)
                own_s = pipeline_step_s(forward_s=forward_s, backward_s=backward_s, micro_batches=micro_batches)
                best = min(best, (own_s, taken))
                return
            for min_s, stop in nexts(len(taken), start):
                if min_s < best[0] * (1 - SUM_ROUNDING):
                    visit((*taken, stop), stop)

        visit((), 0)
        return best

    def _bound_s(self, depth: int, micro_batches: int, position: int, start: int, stop: int) -> float:
        """Return the seconds that a pipeline with this stage takes at least; infinite where the stage does not fit.

        Before a stage runs anything, its forward and its backward have to pass all stages ahead; and its first backward
        waits for the pipeline's others, while it runs no more than its warm-up and one forward.
        """
        # By the paper's formula, with what unequal layers need added up, and by our own count.
        to_end, memory = depth - position, self._memory
        if not (
            memory.fits_without_messages(start, stop, in_flight=to_end)
            and memory.fits(start, stop, to_end=to_end, micro_batches=micro_batches)
        ):
            return math.inf
        forward_s, backward_s = self._stage_s(start, stop)
        ahead_s = self._forward[start] + self._backward[start] + 2 * position * self._overhead_s
        whole_s = self._forward[-1] + self._backward[-1] + 2 * depth * self._overhead_s
        after = micro_batches - min(to_end, micro_batches)
        return max(
            ahead_s + micro_batches * (forward_s + backward_s),
            whole_s + (micro_batches - 1) * backward_s + after * forward_s,
        )

    def _stage_s(self, start: int, stop: int) -> tuple[float, float]:
        forward_s = self._overhead_s + self._forward[stop] - self._forward[start]
        return forward_s, self._overhead_s + self._backward[stop] - self._backward[start]


# Shared by all plans for a workload: a policy asks again after each loss.
_equal_cuts = lru_cache(maxsize=4)(_EqualCuts)
