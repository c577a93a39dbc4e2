"""The least step time over all pipelines side by side, by trying everything: every order of kinds of workers in a
pipeline, every cut, every share, with and without recomputation, fused and split backward, every way to use up the
workers.

Shares with the search only what times a given pipeline (`best_program`) and, for split backward and recomputation, what
a stage holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, permutations

from chameleon_ft.cluster import Worker
from chameleon_ft.estimate import program_memory
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import CostModel, InFlightLimit, Operation, OperationKind, Program, best_program
from chameleon_ft.search._memory import StageMemory

Kind = tuple[float, int | None]


def kind_of(worker: Worker) -> Kind:
    return worker.speed, worker.memory_bytes


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """The stops of all contiguous cuts."""
    for inner in combinations(range(1, layers), stages - 1):
        yield (*inner, layers)


def one_f_one_b(route: Route, hop: int, in_flight: int, micro_batches: int) -> tuple[Operation, ...]:
    """What a worker runs that has as many micro-batches in flight as it may, as soon and as long as it can."""
    routes = [Route(number, route.hops) for number in range(micro_batches)]
    order: list[Operation] = []
    ahead = min(in_flight, micro_batches)
    for number in range(ahead):
        order.append(Operation.of(OperationKind.FORWARD, routes[number], hop))
    for number in range(micro_batches):
        order.append(Operation.of(OperationKind.BACKWARD, routes[number], hop))
        if ahead + number < micro_batches:
            order.append(Operation.of(OperationKind.FORWARD, routes[ahead + number], hop))
    return tuple(order)


@dataclass(frozen=True)
class Exhaustive:
    """Everything that can be done with the workers of `costs`."""

    costs: CostModel

    def least_s(self) -> float:
        """Seconds of the fastest plan with fused or with split backward; infinite if none fits."""
        return min(self.least_of_kind_s(split) for split in (False, True))

    def least_of_kind_s(self, split: bool) -> float:
        """The same with only one of them."""
        workload = self.costs.workload
        by_kind: dict[Kind, list[int]] = {}
        for worker in self.costs.cluster.workers:
            by_kind.setdefault(kind_of(worker), []).append(worker.id)
        kinds = sorted(by_kind, key=str)
        counts = tuple(len(by_kind[kind]) for kind in kinds)
        deepest = min(sum(counts), len(workload.layers))
        times: dict[tuple[tuple[int, ...], int], float] = {}
        for workers in self._pipelines([by_kind[kind] for kind in kinds], deepest):
            size = tuple(sum(worker in by_kind[kind] for worker in workers) for kind in kinds)
            for stops in cuts(len(workload.layers), len(workers)):
                for share in range(1, workload.micro_batches + 1):
                    time_s = min(
                        self.pipeline_s(workers, stops, share, split, recompute) for recompute in self._recompute()
                    )
                    times[size, share] = min(time_s, times.get((size, share), math.inf))
        sizes = sorted({size for size, _ in times})

        @cache
        def least(left: tuple[int, ...], micro_batches: int) -> float:
            if not micro_batches:
                return 0.0
            best = math.inf
            for size in sizes:
                rest = tuple(have - taken for have, taken in zip(left, size, strict=True))
                if min(rest) < 0:
                    continue
                for share in range(1, micro_batches + 1):
                    own_s = times[size, share]
                    if own_s < best:
                        best = min(best, max(own_s, least(rest, micro_batches - share)))
            return best

        return least(counts, workload.micro_batches)

    def _recompute(self) -> tuple[bool, ...]:
        """Whether it may be worth it."""
        limited = any(worker.memory_bytes is not None for worker in self.costs.cluster.workers)
        return (False, True) if limited else (False,)

    def pipeline_s(
        self, workers: Sequence[int], stops: tuple[int, ...], share: int, split: bool, recompute: bool = False
    ) -> float:
        """Seconds of one pipeline; infinite if a stage cannot keep what 1F1B has in flight there."""
        hops = tuple(Hop(w, LayerRange(*cut)) for w, cut in zip(workers, pairwise((0, *stops)), strict=True))
        ceiling: dict[int, InFlightLimit] = {}
        for position, hop in enumerate(hops):
            limit = self._limit(hops, position, share, split, recompute)
            if limit is None:
                return math.inf
            ceiling[hop.worker] = limit
        plan = Plan(
            Placement(stops[-1], {hop.worker: (hop.layers,) for hop in hops}),
            tuple(Route(number, hops) for number in range(share)),
            split,
            frozenset(workers) if recompute else frozenset(),
        )
        return best_program(plan, self.costs, ceiling=ceiling).step_s

    def _limit(
        self, hops: tuple[Hop, ...], position: int, share: int, split: bool, recompute: bool
    ) -> InFlightLimit | None:
        """The most that the memory of a stage allows, up to a pipeline's depth more than 1F1B needs."""
        depth = len(hops)
        own = depth - position
        wishes = [InFlightLimit(own + extra, (depth if split else own) + extra) for extra in range(depth, -1, -1)]
        if split:
            wishes += [InFlightLimit(own, kept) for kept in range(depth - 1, own - 1, -1)]
        capacity = self.costs.cluster.worker(hops[position].worker).memory_bytes
        for wish in wishes:
            if capacity is None or self._held_bytes(hops, position, wish, share, split, recompute) <= capacity:
                return wish
        return None

    def _held_bytes(
        self, hops: tuple[Hop, ...], position: int, limit: InFlightLimit, share: int, split: bool, recompute: bool
    ) -> int:
        hop = hops[position]
        if split or recompute:
            workload = self.costs.workload.recomputed() if recompute else self.costs.workload
            memory = StageMemory(workload, split_backward=split)
            return memory.stage_bytes(hop.layers.start, hop.layers.stop, limit, share)
        order = one_f_one_b(Route(0, hops), position, limit.in_flight, share)
        placement = Placement(len(self.costs.workload.layers), {each.worker: (each.layers,) for each in hops})
        program = Program({hop.worker: order})
        return program_memory(program, placement, self.costs.workload)[hop.worker].peak_bytes

    @staticmethod
    def _pipelines(members: Sequence[Sequence[int]], deepest: int) -> Iterator[tuple[int, ...]]:
        """For every order of kinds, some workers of these kinds."""
        kinds = [number for number, own in enumerate(members) for _ in own]
        for depth in range(1, deepest + 1):
            for order in sorted(set(permutations(kinds, depth))) if len(members) > 1 else [(0,) * depth]:
                used: Counter[int] = Counter()
                workers: list[int] = []
                for kind in order:
                    workers.append(members[kind][used[kind]])
                    used[kind] += 1
                yield tuple(workers)
