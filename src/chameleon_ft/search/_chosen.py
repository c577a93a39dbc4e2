"""What a published planner chooses is scheduled and replayed like any other plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.plan import Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule.best import DEFAULT_EFFORT
from chameleon_ft.search._bounds import Stops
from chameleon_ft.search._effort import LOOK
from chameleon_ft.search._kinds import Crew
from chameleon_ft.search._memory import StageMemory, base_limit
from chameleon_ft.search._placed import PlacedPipeline, Places, found_plan, synced_s
from chameleon_ft.search._timed import Timer
from chameleon_ft.search.result import FoundPlan

# Of mixes that an estimate finds equal, the fewest pipelines have least to reduce, and the most the fewest messages.
_FROM_EACH_END: Final = 2


class Room:
    """Whether 1F1B of a stage fits the smallest worker: these planners take all to be equal."""

    def __init__(self, costs: CostModel, *, split_backward: bool) -> None:
        known = [worker.memory_bytes for worker in costs.cluster.workers if worker.memory_bytes is not None]
        self.capacity = min(known, default=None)
        self._memory = StageMemory(costs.workload, split_backward=split_backward)
        self._known: dict[tuple[int, int, int, int], bool] = {}

    def fits(self, start: int, stop: int, *, to_end: int, micro_batches: int) -> bool:
        """Whether layers `start` to `stop` do, `to_end` stages from the end of the pipeline, 1 at the last."""
        if self.capacity is None:
            return True
        key = start, stop, to_end, micro_batches
        if key not in self._known:
            needed = self._memory.stage_bytes(start, stop, base_limit(0, to_end), micro_batches)
            self._known[key] = needed <= self.capacity
        return self._known[key]


def fastest_of(
    name: str,
    choices: Sequence[Sequence[tuple[Stops, int]]],
    costs: CostModel,
    *,
    split_backward: bool,
    current: Placement | None,
) -> FoundPlan:
    """Of pipelines given by where their stages stop and by micro-batches, those that a quick replay finds fastest.

    Of many choices the first and the last are replayed.
    """
    crew = Crew.of(costs.cluster)
    kind_of = {worker: kind for kind, members in enumerate(crew.members) for worker in members}
    places = Places(Crew.of(_of_equals(costs.cluster)), costs)
    timer = Timer(costs, crew, split_backward=split_backward)

    def placed(
        pipelines: Sequence[tuple[Stops, int]], workers: Sequence[tuple[int, ...]], *, effort: int
    ) -> list[PlacedPipeline]:
        found: list[PlacedPipeline] = []
        for (stops, micro_batches), own in zip(pipelines, workers, strict=True):
            shape = tuple(kind_of[worker] for worker in own)
            found.append(PlacedPipeline(timer.timed(own, shape, stops, micro_batches, effort=effort), own))
        return found

    few = choices if len(choices) <= 2 * _FROM_EACH_END else [*choices[:_FROM_EACH_END], *choices[-_FROM_EACH_END:]]
    ways = [
        placed(pipelines, workers, effort=LOOK)
        for pipelines in few
        for workers in places.ways([(0,) * len(stops) for stops, _ in pipelines], [stops for stops, _ in pipelines])
    ]
    quick = min(ways, key=lambda pipelines: synced_s(pipelines, timer))
    chosen = [(each.timed.stops, each.timed.micro_batches) for each in quick]
    best = placed(chosen, [each.workers for each in quick], effort=DEFAULT_EFFORT)
    return found_plan(name, min((best, quick), key=lambda pipelines: synced_s(pipelines, timer)), timer, current)


def _of_equals(cluster: Cluster) -> Cluster:
    return Cluster(tuple(Worker(w.id, w.host) for w in cluster.workers), cluster.intra_host, cluster.inter_host)
