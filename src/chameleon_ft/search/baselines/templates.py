"""The pipeline templates of Oobleck."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from chameleon_ft.errors import ConfigError
from chameleon_ft.estimate import state_bytes
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.baselines.layouts import CutPoints, OneFOneBMemory, memory_of, smallest_memory_bytes
from chameleon_ft.workload import Workload

__all__ = ["PipelineTemplate", "pipeline_templates"]

# N_b / S, for which templates are made.
_PER_STAGE = 4
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTemplate:
    """A pipeline for a number of nodes.

    Attributes:
        cut_points: for each stage, one on each node, the layer after its last one.
        slowest: number of the slowest stage (k*), from 0; the first of equals.
        slowest_s: seconds of its forward and backward.
        pass_s: T1, seconds of one micro-batch through all stages and back.
        tail_s: T3, the same from the slowest stage on.
    """

    cut_points: CutPoints
    slowest: int
    slowest_s: float
    pass_s: float
    tail_s: float

    @property
    def nodes(self) -> int:
        """Stages, one for each node."""
        return len(self.cut_points)

    def iteration_s(self, micro_batches: int) -> float:
        """T1 + T2 + T3, with T2 = (N_b - S + k* - 1) t_k*; linear in the micro-batches (N_b)."""
        return self.pass_s + (micro_batches - self.nodes + self.slowest - 1) * self.slowest_s + self.tail_s


def pipeline_templates(
    costs: CostModel, *, fault_tolerance: int = 0, recompute: bool = False, with_room: bool = False
) -> dict[int, PipelineTemplate]:
    """Templates by number of nodes, ascending, for n_0, n_0 + 1, ... N - f n_0 nodes.

    n_0 is the fewest nodes that hold the model under 1F1B, with 4 S micro-batches or the step's if those are fewer. See
    `oobleck_plan`.

    Such a pipeline may leave no room for layers that arrive, and then its nodes can take no other template's stages.
    `with_room`, n_0 is the fewest nodes of which each can receive any stage beside its own, if there are any.

    Args:
        costs: what is to be computed, and the live workers.
        fault_tolerance: f, losses that leave a copy of every layer.
        recompute: whether all stages recompute activations.
        with_room: whether nodes have room to be reconfigured.

    Raises:
        ConfigError: negative `fault_tolerance`.
    """
    if fault_tolerance < 0:
        raise ConfigError(f"fault_tolerance must be zero or more; got {fault_tolerance}")
    memory_bytes = smallest_memory_bytes(costs.cluster)
    cutter = _cutter(costs.workload, memory_bytes, recompute=recompute)
    most = min(len(costs.cluster.workers), len(costs.workload.layers))
    found: dict[int, PipelineTemplate] = {}
    for nodes in range(1, most + 1):
        if found and nodes > len(costs.cluster.workers) - fault_tolerance * next(iter(found)):
            break
        if (template := cutter.template(nodes)) is not None:
            found[nodes] = template
    if not with_room or memory_bytes is None:
        return found
    roomy = (nodes for nodes in found if _exchange_bytes(found[nodes].cut_points, costs.workload) <= memory_bytes)
    fewest = next(roomy, 0)
    return {nodes: template for nodes, template in found.items() if nodes >= fewest}


def _exchange_bytes(cut_points: CutPoints, workload: Workload) -> int:
    """Bytes of the largest stage between two steps, gradients included, and of the state of another such beside it."""
    held = list(accumulate((2 * state_bytes(layer) + layer.gradient_bytes for layer in workload.layers), initial=0))
    return max(held[stop] - held[start] for start, stop in pairwise((0, *cut_points)))


@lru_cache(maxsize=8)
def _cutter(workload: Workload, capacity_bytes: int | None, *, recompute: bool) -> _Cutter:
    return _Cutter(workload, memory_of(workload, capacity_bytes, recompute=recompute), recompute=recompute)


class _Cutter:
    """The stages of least T1 + T2 + T3.

    T1 is the same for all cuts. So all depends on the slowest stage: which layers it has, and how many stages are
    ahead of it. Others may be any that are no slower.
    """

    def __init__(self, workload: Workload, memory: OneFOneBMemory, *, recompute: bool) -> None:
        layers = (workload.recomputed() if recompute else workload).layers
        self._num_layers = len(layers)
        self._micro_batches = workload.micro_batches
        self._memory = memory
        self._overhead_s = 2 * workload.operation_overhead_s
        self.template = cache(self._template)
        self._until_s = list(accumulate((layer.forward_s + layer.backward_s for layer in layers), initial=0.0))
        stages = ((start, stop) for start in range(len(layers)) for stop in range(start + 1, len(layers) + 1))
        self._by_time = sorted((self._stage_s(*stage), *stage) for stage in stages)

    def _template(self, nodes: int) -> PipelineTemplate | None:
        """The best cut for so many nodes; None if none fits."""
        best: PipelineTemplate | None = None
        best_s = math.inf
        whole_s = self._until_s[-1] + nodes * self._overhead_s
        for slowest_s, start, stop in self._by_time:
            if nodes * slowest_s < whole_s * (1 - _ROUNDING):
                continue
            # With k* = 0, and nothing after the slowest.
            if whole_s + (_PER_STAGE - 1) * nodes * slowest_s >= best_s:
                break
            for position in range(max(0, nodes - self._num_layers + stop - 1), min(start, nodes - 1) + 1):
                if self._estimate_s(nodes, position, start, slowest_s) >= best_s * (1 - _ROUNDING):
                    continue
                stops = self._around(nodes, position, start, stop)
                if stops is not None:
                    best = self._of(stops)
                    best_s = best.iteration_s(_PER_STAGE * nodes)
        return best

    def _estimate_s(self, nodes: int, slowest: int, start: int, slowest_s: float) -> float:
        whole_s = self._until_s[-1] + nodes * self._overhead_s
        tail_s = self._until_s[-1] - self._until_s[start] + (nodes - slowest) * self._overhead_s
        return whole_s + ((_PER_STAGE - 1) * nodes + slowest - 1) * slowest_s + tail_s

    def _of(self, stops: CutPoints) -> PipelineTemplate:
        times_s = [self._stage_s(start, stop) for start, stop in pairwise((0, *stops))]
        # The estimate depends on which of equals it is: no matter of rounding.
        slowest = next(stage for stage, own_s in enumerate(times_s) if own_s >= max(times_s) * (1 - _ROUNDING))
        return PipelineTemplate(
            cut_points=stops,
            slowest=slowest,
            slowest_s=times_s[slowest],
            pass_s=math.fsum(times_s),
            tail_s=math.fsum(times_s[slowest:]),
        )

    def _around(self, nodes: int, position: int, start: int, stop: int) -> CutPoints | None:
        """A cut with this stage at this position and none slower; None if there is none that fits."""
        if not self._fits(nodes, position, start, stop):
            return None
        most_s = self._stage_s(start, stop) * (1 + _ROUNDING)
        ahead = self._cut(nodes, range(position), 0, start, most_s)
        after = None if ahead is None else self._cut(nodes, range(position + 1, nodes), stop, self._num_layers, most_s)
        return None if ahead is None or after is None else (*ahead, stop, *after)

    def _cut(self, nodes: int, positions: range, first: int, last: int, most_s: float) -> CutPoints | None:
        """Stages at these positions for layers `first` to `last`, each as large as can be, or smaller where memory
        makes that a dead end."""

        @cache
        def cut(position: int, start: int) -> CutPoints | None:
            left = positions.stop - position
            if not left:
                return () if start == last else None
            if self._until_s[last] - self._until_s[start] + left * self._overhead_s <= left * most_s:
                for stop in range(last - left + 1, start, -1):
                    if self._stage_s(start, stop) <= most_s and self._fits(nodes, position, start, stop):
                        rest = cut(position + 1, stop)
                        if rest is not None:
                            return (stop, *rest)
            return None

        return cut(positions.start, first)

    def _fits(self, nodes: int, position: int, start: int, stop: int) -> bool:
        share = min(_PER_STAGE * nodes, self._micro_batches)
        return self._memory.fits(start, stop, to_end=nodes - position, micro_batches=share)

    def _stage_s(self, start: int, stop: int) -> float:
        return self._until_s[stop] - self._until_s[start] + self._overhead_s
