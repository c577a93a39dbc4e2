"""What a published planner chooses is scheduled and replayed like any other plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.estimate import program_memory, state_bytes
from chameleon_ft.plan import LayerRange, Placement, Plan, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.search._arrange import by_pipeline, by_stage
from chameleon_ft.search._cuts import Cuts, Stops
from chameleon_ft.search._kinds import Crew
from chameleon_ft.search._memory import StageMemory, base_limit
from chameleon_ft.search._sync import PlacedPipeline, synced_s
from chameleon_ft.search._timed import Timer, hops_of
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
    replays = _Replays(costs, split_backward=split_backward)
    few = choices if len(choices) <= 2 * _FROM_EACH_END else [*choices[:_FROM_EACH_END], *choices[-_FROM_EACH_END:]]
    ways = [replays.placed(pipelines, workers, best=False) for pipelines in few for workers in replays.ways(pipelines)]
    placed = min(ways, key=lambda placed: synced_s(placed, costs))
    chosen = [(each.timed.stops, each.timed.micro_batches) for each in placed]
    best = replays.placed(chosen, [each.workers for each in placed], best=True)
    fastest = min((best, placed), key=lambda placed: synced_s(placed, costs))
    return replays.built(name, fastest, current)


class _Replays:
    """Pipelines of given cuts and shares on real workers."""

    def __init__(self, costs: CostModel, *, split_backward: bool) -> None:
        self._costs = costs
        crew = Crew.of(costs.cluster)
        self._kind = {worker: kind for kind, members in enumerate(crew.members) for worker in members}
        self._equals = Crew.of(_of_equals(costs.cluster))
        self._cuts = Cuts(costs, crew.kinds, split_backward=split_backward)
        self._timer = Timer(costs, crew, self._cuts)

    def ways(self, pipelines: Sequence[tuple[Stops, int]]) -> list[list[tuple[int, ...]]]:
        """Workers for each, with neighbours in a pipeline on one host, and with holders of the same layers on one."""
        shapes = [(0,) * len(stops) for stops, _ in pipelines]
        return [
            by_pipeline(shapes, self._equals, self._costs.cluster),
            by_stage(shapes, [stops for stops, _ in pipelines], self._equals),
        ]

    def placed(
        self, pipelines: Sequence[tuple[Stops, int]], workers: Sequence[tuple[int, ...]], *, best: bool
    ) -> list[PlacedPipeline]:
        placed: list[PlacedPipeline] = []
        for (stops, micro_batches), own in zip(pipelines, workers, strict=True):
            shape = tuple(self._kind[worker] for worker in own)
            placed.append(PlacedPipeline(self._timer.timed(own, shape, stops, micro_batches, best=best), own))
        return placed

    def built(self, name: str, placed: Sequence[PlacedPipeline], current: Placement | None) -> FoundPlan:
        held: dict[int, tuple[LayerRange, ...]] = {}
        routes: list[Route] = []
        ceiling: dict[int, InFlightLimit] = {}
        for each in placed:
            timed = each.timed
            hops = hops_of(each.workers, timed.stops)
            held.update((hop.worker, (hop.layers,)) for hop in hops)
            limits = self._cuts.limits(timed.shape, timed.stops, timed.micro_batches)
            ceiling.update(zip(each.workers, limits, strict=True))
            routes += [Route(number, hops) for number in range(len(routes), len(routes) + timed.micro_batches)]
        workload = self._costs.workload
        programs = {id(each.timed): each.timed for each in placed}.values()
        return FoundPlan(
            name=name,
            plan=Plan(Placement(len(workload.layers), held), tuple(routes), self._cuts.split_backward),
            ceiling=FrozenMap(ceiling),
            step_s=synced_s(placed, self._costs),
            program_s=max(timed.program_s for timed in programs),
            peak_bytes=max(
                memory.peak_bytes
                for timed in programs
                for memory in program_memory(timed.program, timed.plan.placement, workload).values()
            ),
            least_moved_bytes=self._least_moved_bytes(len(placed), current),
        )

    def _least_moved_bytes(self, pipelines: int, current: Placement | None) -> int:
        live = set(self._kind)
        total = 0
        for index, layer in enumerate(self._costs.workload.layers):
            have = 0 if current is None else len(live.intersection(current.holders(index)))
            total += max(0, pipelines - have) * state_bytes(layer)
        return total


def _of_equals(cluster: Cluster) -> Cluster:
    return Cluster(tuple(Worker(w.id, w.host) for w in cluster.workers), cluster.intra_host, cluster.inter_host)
