"""The search of the Chameleon paper (arXiv 2508.21613), to be compared with `find_plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

from chameleon_ft.errors import PlanError
from chameleon_ft.estimate import state_bytes
from chameleon_ft.plan import Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import Stops
from chameleon_ft.search._chosen import Room, fastest_of
from chameleon_ft.search._least_mix import LeastMix
from chameleon_ft.search.baseline import BaselinePlan

__all__ = ["paper_plan"]

_ROUNDING = 1e-12


def paper_plan(
    costs: CostModel, *, split_backward: bool = False, current: Placement | None = None
) -> BaselinePlan | None:
    """The pipelines that the paper's search chooses for all workers of the cluster; None if it finds none that fit.

    The paper's, as it is reported (DESIGN section 12): for each number of pipelines, every partition of the workers
    into depths; micro-batches by the floor of the proportional share, then every placement of the remainder; layers
    equally, then every placement of the remainder; what L_i (m_p + m_g + m_opt) + (N_pp - i) L_i m_act does not let
    fit is dropped; the least time by dynamic programming over 1F1B (`estimate.paper.unequal_step_s`) is chosen. Workers
    are equal in it, messages and gradient sync free.

    Ours: a remainder may be placed on one stage or pipeline as a whole, too. Layers may be unequal: what they need is
    added up, and an operation's overhead is part of its time. No pipeline goes without micro-batches, and what 1F1B
    would not fit by our own count of memory is dropped as well. Where workers are unequal, the smallest memory counts.
    Of mixes of equal time, two with the fewest and two with the most pipelines are replayed, and the fastest is taken.
    Workers get stages in the two ways of `find_plan`, programs are by `best_program`, with split backward if asked for.
    Depths are bounded by the layers. Neither partitions nor placements are listed one by one: equal depths have equal
    times, so a knapsack finds the best partition, and lower bounds rule out most placements of layers. The time is that
    of trying all.

    Args:
        costs: what is to be computed, and who is left.
        split_backward: what the chosen plan runs; it does not change the choice, but for memory.
        current: which layers the live workers hold now, for the bytes to move.

    Raises:
        PlanError: no worker is left.
    """
    workers, micro_batches = len(costs.cluster.workers), costs.workload.micro_batches
    if not workers:
        raise PlanError("no worker is left to plan for; start at least one")
    cuts = _EqualCuts(costs, Room(costs, split_backward=split_backward))
    mixes = LeastMix(
        range(1, min(workers, len(costs.workload.layers)) + 1),
        workers=workers,
        micro_batches=micro_batches,
        time_s=cuts.time_s,
        least_share=lambda depth: micro_batches * depth // workers,
    ).mixes()
    if not mixes:
        return None
    found = fastest_of(
        "paper",
        [[(cuts.stops(*each), each[1]) for each in mix.pipelines] for mix in mixes],
        costs,
        split_backward=split_backward,
        current=current,
    )
    return BaselinePlan(found=found, estimate_s=mixes[0].time_s)


class _EqualCuts:
    """Equal stages, but for the remainder, which is placed so that the paper's estimate is least."""

    def __init__(self, costs: CostModel, room: Room) -> None:
        layers = costs.workload.layers
        self._num_layers = len(layers)
        self._overhead_s = costs.workload.operation_overhead_s
        self._room = room
        self._forward = list(accumulate((layer.forward_s for layer in layers), initial=0.0))
        self._backward = list(accumulate((layer.backward_s for layer in layers), initial=0.0))
        self._state = list(accumulate((state_bytes(layer) + layer.gradient_bytes for layer in layers), initial=0))
        self._activations = list(accumulate((layer.activation_bytes for layer in layers), initial=0))
        self._known: dict[tuple[int, int], tuple[float, Stops]] = {}

    def time_s(self, depth: int, micro_batches: int) -> float:
        """Seconds of the best placement; infinite if none fits."""
        return self._best(depth, micro_batches)[0]

    def stops(self, depth: int, micro_batches: int) -> Stops:
        """The best placement, by where its stages stop."""
        return self._best(depth, micro_batches)[1]

    def _best(self, depth: int, micro_batches: int) -> tuple[float, Stops]:
        key = depth, micro_batches
        if key not in self._known:
            self._known[key] = self._searched(depth, micro_batches)
        return self._known[key]

    def _searched(self, depth: int, micro_batches: int) -> tuple[float, Stops]:
        """Depth first through the placements, the most promising stage first, without those that cannot be better."""
        bound_s = self._bounds(depth, micro_batches)
        share, spare = divmod(self._num_layers, depth)
        best: tuple[float, Stops] = (math.inf, ())

        @cache
        def least_s(position: int, start: int) -> float:
            """No placement from here on takes less."""
            if position == depth:
                return 0.0 if start == self._num_layers else math.inf
            return min(
                max(bound_s(position, start, stop), least_s(position + 1, stop)) for stop in stops(position, start)
            )

        def stops(position: int, start: int) -> range:
            left = spare - (start - position * share)
            return range(start + share, start + share + left + 1)

        def visit(taken: Stops, start: int, so_far_s: float) -> None:
            nonlocal best
            if len(taken) == depth:
                own_s = self._estimate_s(taken, micro_batches)
                best = min(best, (own_s, taken))
                return
            position = len(taken)
            ways = sorted(
                (max(so_far_s, bound_s(position, start, stop), least_s(position + 1, stop)), stop)
                for stop in stops(position, start)
            )
            for way_s, stop in ways:
                if way_s < best[0] * (1 - _ROUNDING):
                    visit((*taken, stop), stop, way_s)

        visit((), 0, 0.0)
        return best

    def _bounds(self, depth: int, micro_batches: int) -> Callable[[int, int, int], float]:
        """What a pipeline takes at the least, by a stage's position and layers; infinite where that does not fit.

        Before a stage runs anything, its forward and its backward have to pass all stages ahead; and its first backward
        waits for the pipeline's others, while it runs no more than its warm-up and one forward.
        """
        whole_s = self._forward[-1] + self._backward[-1] + 2 * depth * self._overhead_s

        @cache
        def bound_s(position: int, start: int, stop: int) -> float:
            if not self._fits(start, stop, depth - position, micro_batches):
                return math.inf
            forward_s, backward_s = self._stage_s(start, stop)
            ahead_s = self._forward[start] + self._backward[start] + 2 * position * self._overhead_s
            after = micro_batches - min(depth - position, micro_batches)
            return max(
                ahead_s + micro_batches * (forward_s + backward_s),
                whole_s + (micro_batches - 1) * backward_s + after * forward_s,
            )

        return bound_s

    def _fits(self, start: int, stop: int, to_end: int, micro_batches: int) -> bool:
        """The paper's `stage_bytes` with what unequal layers need added up, and our own count."""
        if self._room.capacity is None:
            return True
        state = self._state[stop] - self._state[start]
        reported = state + to_end * (self._activations[stop] - self._activations[start])
        return reported <= self._room.capacity and self._room.fits(
            start, stop, to_end=to_end, micro_batches=micro_batches
        )

    def _stage_s(self, start: int, stop: int) -> tuple[float, float]:
        forward_s = self._overhead_s + self._forward[stop] - self._forward[start]
        return forward_s, self._overhead_s + self._backward[stop] - self._backward[start]

    def _estimate_s(self, stops: Stops, micro_batches: int) -> float:
        forward_s, backward_s = zip(*(self._stage_s(*pair) for pair in pairwise((0, *stops))), strict=True)
        return _one_f_one_b_s(forward_s, backward_s, micro_batches)


def _one_f_one_b_s(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """`estimate.paper.pipeline_step_s` wave by wave, in a fraction of the time.

    In wave k the stage i of P runs the forward of micro-batch k + P - 1 - i, whose input the stage before has made in
    wave k - 1, and then the backward of micro-batch k.
    """
    depth = len(forward_s)
    free_s = [0.0] * depth
    made_s = [0.0] * (depth + 1)  # by the stage before
    for wave in range(1 - depth, micro_batches):
        for stage in range(min(depth, wave + depth) - 1, max(0, wave + depth - micro_batches) - 1, -1):
            free_s[stage] = made_s[stage + 1] = max(free_s[stage], made_s[stage]) + forward_s[stage]
        if wave >= 0:
            done_s = 0.0
            for stage in range(depth - 1, -1, -1):
                done_s = free_s[stage] = max(free_s[stage], done_s) + backward_s[stage]
    return max(free_s)
