"""Placing and scheduling the pipelines that a published planner chooses, so that they compare with our own plans."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, TypeAlias, TypeVar

from chameleon_ft.cluster import Cluster
from chameleon_ft.estimate import PartsEstimate, estimate_parts, state_bytes
from chameleon_ft.estimate.memory import stages_of
from chameleon_ft.estimate.pipeline_memory import one_f_one_b_bytes
from chameleon_ft.plan import LayerRange, PipelineLayout, Placement, Plan, pipelines_plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit, default_limits
from chameleon_ft.schedule.best import DEFAULT_EFFORT, best_parts
from chameleon_ft.search.baselines.result import BaselinePlan
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.transfer import moved_bytes
from chameleon_ft.workload import Workload

__all__ = [
    "CutPoints",
    "Layout",
    "OneFOneBMemory",
    "ends_of",
    "fastest_layout",
    "memory_of",
    "smallest_memory_bytes",
]

MixT = TypeVar("MixT")

CutPoints: TypeAlias = tuple[int, ...]
"""Of a pipeline, for each stage the layer after its last one."""

# Operations that may be scheduled for each part of a plan that is only compared with others.
_COMPARE_EFFORT: Final = 10_000
# Of mixes that an estimate finds equal, the fewest pipelines have least to reduce, and the most the fewest messages.
_FROM_EACH_END: Final = 2
_MOST_ORDERS: Final = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipelines on workers that are all alike, which is how published planners see them.

    Attributes:
        pipelines: cut points and micro-batches of each.
        recompute: whether all workers recompute activations.
        estimate_s: seconds of a step by the planner's own estimate.
    """

    pipelines: tuple[tuple[CutPoints, int], ...]
    recompute: bool
    estimate_s: float


class OneFOneBMemory:
    """Whether stages under 1F1B fit the smallest worker."""

    def __init__(self, workload: Workload, capacity_bytes: int | None, *, recompute: bool) -> None:
        self._num_layers = len(workload.layers)
        self._stages = stages_of(workload)
        self._recompute = recompute
        self._fits: dict[tuple[int, int, int, int], bool] = {}
        layers = (workload.recomputed() if recompute else workload).layers
        self._held = list(accumulate((state_bytes(layer) + layer.gradient_bytes for layer in layers), initial=0))
        self._activations = list(accumulate((layer.activation_bytes for layer in layers), initial=0))
        self.capacity_bytes = capacity_bytes

    def fits(self, start: int, stop: int, *, to_end: int, micro_batches: int) -> bool:
        """Whether layers `start` to `stop` do, `to_end` stages from the end of the pipeline, 1 at the last one."""
        if self.capacity_bytes is None:
            return True
        # Less than that, without messages and work space, no stage needs when its warm-up has ended.
        in_flight = min(to_end, micro_batches)
        least = self._held[stop] - self._held[start] + in_flight * (self._activations[stop] - self._activations[start])
        if least > self.capacity_bytes:
            return False
        key = start, stop, to_end, micro_batches
        if key not in self._fits:
            needed = one_f_one_b_bytes(
                LayerRange(start, stop),
                self._stages,
                num_layers=self._num_layers,
                to_end=to_end,
                micro_batches=micro_batches,
                recompute=self._recompute,
            )
            self._fits[key] = needed <= self.capacity_bytes
        return self._fits[key]

    def most_in_flight(self, layers: LayerRange, *, at_most: int, micro_batches: int) -> int:
        """Micro-batches that a stage can keep in flight, up to `at_most`; 1 at the least."""
        counts = range(2, at_most + 1)
        return 1 + bisect_left(
            counts,
            True,
            key=lambda count: not self.fits(layers.start, layers.stop, to_end=count, micro_batches=micro_batches),
        )

    def fits_all(self, cut_points: CutPoints, micro_batches: int) -> bool:
        """Whether all stages of a pipeline do."""
        stages = enumerate(pairwise((0, *cut_points)))
        return all(
            self.fits(*stage, to_end=len(cut_points) - position, micro_batches=micro_batches)
            for position, stage in stages
        )


@lru_cache(maxsize=8)
def memory_of(workload: Workload, capacity_bytes: int | None, *, recompute: bool) -> OneFOneBMemory:
    """Shared by all plans for the workload: a policy asks again after each loss."""
    return OneFOneBMemory(workload, capacity_bytes, recompute=recompute)


def smallest_memory_bytes(cluster: Cluster) -> int | None:
    """The least known capacity; None if no worker's is known."""
    return min((each.memory_bytes for each in cluster.workers if each.memory_bytes is not None), default=None)


def ends_of(mixes: Sequence[MixT]) -> Sequence[MixT]:
    """Of many mixes of equal time, by number of pipelines, the first two and the last two."""
    return mixes if len(mixes) <= 2 * _FROM_EACH_END else [*mixes[:_FROM_EACH_END], *mixes[-_FROM_EACH_END:]]


def fastest_layout(
    name: str,
    layouts: Iterable[Layout],
    costs: CostModel,
    *,
    split_backward: bool,
    current: Placement | None,
) -> BaselinePlan | None:
    """The layout that a replay finds fastest, on the workers that suit it best; None if no layout fits their memory.

    With fused backward, programs are 1F1B. With split backward, they are by `best_program`, with as many micro-batches
    in flight as fit the memory, and those of 1F1B at the least.
    """
    candidates = [
        (predicted.step_s, number, plan, layout)
        for number, (plan, layout) in enumerate(
            (_plan(layout, workers, split_backward=split_backward), layout)
            for layout in layouts
            for workers in _assignments(layout, costs)
        )
        if (predicted := _predicted(plan, costs, effort=_COMPARE_EFFORT)) is not None
    ]
    for _, _, plan, layout in sorted(candidates, key=lambda each: each[:2]):
        predicted = _predicted(plan, costs, effort=DEFAULT_EFFORT)
        if predicted is not None:
            found = _found(name, plan, predicted, costs, current)
            return BaselinePlan(found=found, estimate_s=layout.estimate_s)
    return None


@dataclass(frozen=True, slots=True)
class _Predicted:
    ceiling: Mapping[int, InFlightLimit]
    estimate: PartsEstimate

    @property
    def step_s(self) -> float:
        return self.estimate.step_s


def _plan(layout: Layout, workers: Sequence[tuple[int, ...]], *, split_backward: bool) -> Plan:
    pipelines = [
        PipelineLayout(cut_points, own, micro_batches)
        for (cut_points, micro_batches), own in zip(layout.pipelines, workers, strict=True)
    ]
    return pipelines_plan(pipelines, split_backward=split_backward, recompute=layout.recompute)


def _predicted(plan: Plan, costs: CostModel, *, effort: float) -> _Predicted | None:
    """The prediction with the most micro-batches in flight that fit; None if not even those of 1F1B do."""
    least = {worker: limit.in_flight for worker, limit in default_limits(plan).items()}
    most = _by_memory(plan, costs) if plan.split_backward else least
    in_flight = {worker: max(count, most[worker]) for worker, count in least.items()}
    while True:
        ceiling = {worker: InFlightLimit(count, count) for worker, count in in_flight.items()}
        estimate = estimate_parts(plan, best_parts(plan, costs, ceiling=ceiling, effort=effort), costs)
        missing = estimate.over_capacity(costs)
        if not missing:
            return _Predicted(ceiling, estimate)
        # One less at a time near the least, and larger steps far from it.
        spare = {worker: in_flight[worker] - least[worker] for worker in missing}
        fewer = {worker: in_flight[worker] - max(1, count // 8) for worker, count in spare.items() if count}
        if not fewer:
            return None
        in_flight |= fewer


def _by_memory(plan: Plan, costs: CostModel) -> dict[int, int]:
    """As many micro-batches as would fit each worker under 1F1B, up to twice the depth of its pipeline."""
    capacity_bytes = smallest_memory_bytes(costs.cluster)
    memory = memory_of(costs.workload, capacity_bytes, recompute=bool(plan.recompute))
    shares = Counter(route.hops for route in plan.routes)
    return {
        hop.worker: memory.most_in_flight(hop.layers, at_most=2 * len(hops), micro_batches=share)
        for hops, share in shares.items()
        for hop in hops
    }


def _found(name: str, plan: Plan, predicted: _Predicted, costs: CostModel, current: Placement | None) -> FoundPlan:
    estimate = predicted.estimate
    return FoundPlan(
        name=name,
        plan=plan,
        ceiling=FrozenMap(predicted.ceiling),
        step_s=estimate.step_s,
        program_s=estimate.program_s,
        peak_bytes=max(estimate.peak_bytes.values()),
        moved_bytes=moved_bytes(current, plan.placement, costs.workload.layers),
        last_hosts=len(plan.placement.indispensable(costs.cluster.hosts)),
    )


def _assignments(layout: Layout, costs: CostModel) -> list[list[tuple[int, ...]]]:
    """Workers for each pipeline: with its neighbours on one host, which makes messages fast; and with the holders of
    the same layers on one host, which makes gradient sync fast."""
    cluster = costs.cluster
    cuts = [cut_points for cut_points, _ in layout.pipelines]
    found = [_by_pipeline([len(cut_points) for cut_points in cuts], cluster)]
    if len(cuts) > 1:
        found += [_by_stage(cuts, order) for order in _orders(cluster)]
    return found


def _by_pipeline(depths: Sequence[int], cluster: Cluster) -> list[tuple[int, ...]]:
    """Deep pipelines choose first: of the hosts with enough free workers the one with fewest, else the one with most,
    and again for the rest."""
    free: dict[str, list[int]] = {}
    for worker in cluster.workers:
        free.setdefault(worker.host, []).append(worker.id)
    found: list[tuple[int, ...]] = [()] * len(depths)
    for index in sorted(range(len(depths)), key=lambda index: -depths[index]):
        taken: list[int] = []
        while len(taken) < depths[index]:
            wanted = depths[index] - len(taken)
            enough = [host for host, left in free.items() if len(left) >= wanted]
            host = (
                min(enough, key=lambda host: len(free[host])) if enough else max(free, key=lambda host: len(free[host]))
            )
            taken += free[host][:wanted]
            free[host] = free[host][wanted:]
        found[index] = tuple(taken)
    return found


def _by_stage(cuts: Sequence[CutPoints], workers: Sequence[int]) -> list[tuple[int, ...]]:
    """Stages take the workers one by one, in the order of the middles of their layers."""
    slots = sorted(
        (start + stop, index, position)
        for index, cut_points in enumerate(cuts)
        for position, (start, stop) in enumerate(pairwise((0, *cut_points)))
    )
    found = [[0] * len(cut_points) for cut_points in cuts]
    for (_, index, position), worker in zip(slots, workers, strict=False):
        found[index][position] = worker
    return list(map(tuple, found))


def _orders(cluster: Cluster) -> list[list[int]]:
    """The workers host by host, from up to four hosts on; one order if all hosts have as many workers.

    Which stages share a host depends on the place of the hosts with fewer workers.
    """
    sizes = Counter(worker.host for worker in cluster.workers)
    hosts = sorted(sizes, key=sizes.__getitem__)
    count = 1 if len(set(sizes.values())) == 1 else min(_MOST_ORDERS, len(hosts))
    orders: list[list[int]] = []
    for number in range(count):
        first = number * len(hosts) // count
        places = {host: place for place, host in enumerate(hosts[first:] + hosts[:first])}
        orders.append([worker.id for worker in sorted(cluster.workers, key=lambda worker: places[worker.host])])
    return orders
