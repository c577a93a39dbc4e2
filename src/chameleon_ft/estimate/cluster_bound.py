"""A lower bound on the time of a step over all ways to make pipelines of a cluster's workers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Final

from chameleon_ft.estimate.bounds import total_work_bound_s
from chameleon_ft.schedule import CostModel

__all__ = ["cluster_bound_s"]

# The bound is given this share below the least time at which enough micro-batches can be finished.
_PRECISION: Final = 1e-6
_ROUNDING: Final = 1e-12


def cluster_bound_s(costs: CostModel, *, micro_batches: int | None = None, split_backward: bool = False) -> float:
    """A lower bound on the time of any plan whose workers are one stage of one pipeline each: any depths, cuts, shares.

    A pipeline of P stages finishes at most m_P(T) micro-batches by T. The bound is the least T at which pipelines of at
    most as many stages as there are workers can finish all: max {sum x_P m_P(T) : sum P x_P <= n} >= M, an unbounded
    knapsack inside a bisection (DESIGN section 4). Workers are taken to be as fast as the fastest, links as the
    fastest.

    Memory is not looked at. Plans whose routes share workers, as after rerouting, are not covered: `total_work_bound_s`
    holds for those.

    Raises:
        PlanError: the cluster is empty.
    """
    count = costs.workload.micro_batches if micro_batches is None else micro_batches
    low = total_work_bound_s(costs, micro_batches=count)
    pipelines = _Pipelines(costs, split_backward=split_backward)
    workers = len(costs.cluster.workers)
    high = max(low, pipelines.alone_s(count))
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if pipelines.most(middle, workers, count) >= count:
            high = middle
        else:
            low = middle
    return low


class _Pipelines:
    """Upper bounds on the micro-batches that pipelines of each depth finish."""

    def __init__(self, costs: CostModel, *, split_backward: bool) -> None:
        layers = costs.workload.layers
        cluster = costs.cluster
        speed = max(worker.speed for worker in cluster.workers)
        head = [layer.forward_s if split_backward else layer.forward_s + layer.backward_s for layer in layers]
        work = [layer.forward_s + (layer.least_backward_s if split_backward else layer.backward_s) for layer in layers]
        self._head_s = [value / speed for value in accumulate(head, initial=0.0)]
        self._work_s = [value / speed for value in accumulate(work, initial=0.0)]
        least_bytes = min((layer.output_bytes for layer in layers[:-1]), default=0)
        fastest_s = min(link.message_s(least_bytes) for link in (cluster.intra_host, cluster.inter_host))
        self._message_s = fastest_s if split_backward else 2 * fastest_s

    def alone_s(self, micro_batches: int) -> float:
        """Seconds in which one worker does everything."""
        return micro_batches * self._work_s[-1]

    def most(self, time_s: float, workers: int, enough: int) -> int:
        """The most micro-batches, up to `enough`, that these workers finish in `time_s`: an unbounded knapsack."""
        deepest = min(workers, len(self._work_s) - 1)
        finished = [self._finished(time_s, depth, enough) for depth in range(deepest + 1)]
        best = [0]
        for used in range(1, workers + 1):
            best.append(max(best[used - depth] + finished[depth] for depth in range(1, min(used, deepest) + 1)))
        return min(best[workers], enough)

    def _finished(self, time_s: float, depth: int, enough: int) -> int:
        """m_P(T), up to `enough`."""
        counts = range(1, enough + 1)
        return bisect_left(counts, True, key=lambda count: not self._can_finish(time_s, depth, count))

    def _can_finish(self, time_s: float, depth: int, micro_batches: int) -> bool:
        """Whether some cut into `depth` stages, or fewer, may do so many micro-batches in `time_s`.

        Stage i needs sum_{j<i} (f_j + b_j + 2 c_j) + m (f_i + b_i), or with split backward sum_{j<i} (f_j + c_j) +
        m (f_i + b_i + w_i). Each stage takes as many layers as it can: the further one stage gets, the further the
        next.
        """
        slack = time_s * (1 + _ROUNDING)
        start = 0
        waited_s = 0.0
        for _ in range(depth):
            budget_s = (slack - self._head_s[start] - waited_s) / micro_batches
            if budget_s <= 0:
                return False
            start = bisect_right(self._work_s, self._work_s[start] + budget_s) - 1
            if start == len(self._work_s) - 1:
                return True
            waited_s += self._message_s
        return False
