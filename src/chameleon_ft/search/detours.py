"""Plans with detours: other holders of the lost workers' layers take over their micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel, InFlightLimit, OperationKind
from chameleon_ft.schedule.best import DEFAULT_EFFORT, best_parts, step_s_of
from chameleon_ft.schedule.components import components, different_ways
from chameleon_ft.schedule.heuristics import ListSchedules, Problem
from chameleon_ft.schedule.list_scheduler import schedule
from chameleon_ft.schedule.network import builder_of

__all__ = ["reroute"]

# In a small plan, operations that may be scheduled to compare a spread, and in search of a better one. A plan is small
# where such a search would have so many trials.
_COMPARE: Final = 6_000
_SEARCH: Final = 8_000
_LEAST_TRIALS: Final = 25
# F, and B or I and W.
_OPERATIONS: Final = 3
# At most this many workers for each lost micro-batch share them: more would gain little, and all pipelines that take
# part wait for each other.
_HELPERS: Final = 2
_BISECTIONS: Final = 30


def reroute(
    plan: Plan,
    lost: Collection[int],
    costs: CostModel,
    *,
    in_flight_limits: Mapping[int, InFlightLimit] | None = None,
) -> Plan:
    """The plan without the lost workers: same placement otherwise, and only micro-batches that have lost one move.

    Several ways to spread them are scheduled, and the fastest is taken: either the lost hops alone go to live holders
    of their layers, so that the largest load is least, and a hop may be cut between several; or whole micro-batches go
    to other pipelines, and to new ones of workers that are left idle. In plans of up to a few hundred operations, hops
    then move and change places as long as that makes the step shorter. Good, not proven optimal; deterministic. Works
    on any plan, also one that was rerouted before. Workers that `plan` does not have are ignored.

    Args:
        plan: what was running.
        lost: ids of the lost workers.
        costs: how long operations and messages take.
        in_flight_limits: what each worker can keep at most; pass the same to `best_program`.

    Raises:
        NoHolderError: layers whose last holder is lost.
        PlanError: the workload has another number of layers than the plan.
    """
    placement = plan.placement.without(lost)
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    losses = _Losses(plan, placement, costs)
    if not losses.broken:
        return losses.rerouted({})
    operations = _OPERATIONS * sum(len(route.hops) for route in plan.routes)
    is_small = operations * _LEAST_TRIALS <= _SEARCH
    spreads = _spreads(losses, cuts=(True, False) if is_small else (True,))
    if is_small:
        spreads += [_improved(spread, losses, costs, in_flight_limits) for spread in spreads[:2]]
    plans = [losses.rerouted(spread) for spread in spreads]
    effort = _COMPARE if is_small else DEFAULT_EFFORT
    return min(
        plans, key=lambda each: step_s_of(best_parts(each, costs, in_flight_limits=in_flight_limits, effort=effort))
    )


def _spreads(losses: _Losses, *, cuts: Iterable[bool]) -> list[_Spread]:
    """Different spreads; the first is usually the fastest. `cuts` are the values of `cut` to look at."""
    wholes = (True, False) if losses.parts(whole_holders=True) != losses.parts(whole_holders=False) else (True,)
    spreads = [losses.detoured(cut=cut, whole_holders=whole) for cut in cuts for whole in wholes]
    if (moved := losses.moved()) is not None:
        spreads.append(moved)
    return [spread for number, spread in enumerate(spreads) if spread not in spreads[:number]]


def _improved(
    start: _Spread, losses: _Losses, costs: CostModel, in_flight_limits: Mapping[int, InFlightLimit] | None
) -> _Spread:
    """`start` after moves and swaps of pieces that made the step shorter, under the best rules first."""
    builder = builder_of(losses.rerouted(start), costs)
    ways = different_ways(route.hops for route in losses.routes(start))
    tried = ListSchedules(Problem.of(builder, *ways, in_flight_limits))
    best, step_s = start, tried.search().step_s
    operations = tried.effort
    for rules in [found.rules for found in tried.schedules]:
        improved = True
        while improved:
            improved = False
            for neighbour in _neighbours(best):
                if operations >= _SEARCH:
                    return best
                ways = different_ways(route.hops for route in losses.routes(neighbour))
                found = schedule(builder.network(*ways), rules)
                operations += len(found.codes)
                if found.step_s < step_s * (1 - ROUNDING):
                    best, step_s, improved = neighbour, found.step_s, True
                    break
    return best


def _neighbours(spread: _Spread) -> Iterator[_Spread]:
    """Spreads that differ in the worker of one piece, or in those of two that have changed places."""
    pieces = {
        (micro_batch, index): piece
        for micro_batch, own in sorted(spread.items())
        for index, piece in enumerate(own)
        if piece.holders
    }
    for place, piece in pieces.items():
        for worker in piece.holders:
            if worker != piece.worker:
                yield _changed(spread, {place: worker})
    for (one, a), (other, b) in combinations(pieces.items(), 2):
        if a.worker != b.worker and b.worker in a.holders and a.worker in b.holders:
            yield _changed(spread, {one: b.worker, other: a.worker})


def _changed(spread: _Spread, workers: Mapping[tuple[int, int], int]) -> _Spread:
    """The spread with other workers for some pieces, given by their micro-batch and place."""
    changed = dict(spread)
    for (micro_batch, index), worker in workers.items():
        pieces = list(changed[micro_batch])
        pieces[index] = replace(pieces[index], worker=worker)
        changed[micro_batch] = tuple(pieces)
    return changed


@dataclass(frozen=True, slots=True)
class _Piece:
    """Layers of a route on a worker; `holders` are all workers that could run them, where their own is lost."""

    layers: LayerRange
    worker: int
    holders: tuple[int, ...] = ()


# For each micro-batch that has lost a worker, its pieces in the order of layers.
_Spread = Mapping[int, tuple[_Piece, ...]]


def _joined_hops(pieces: Iterable[_Piece]) -> tuple[Hop, ...]:
    """The pieces of a route as hops; neighbours on the same worker are one."""
    hops: list[Hop] = []
    for piece in pieces:
        if hops and hops[-1].worker == piece.worker:
            hops[-1] = Hop(piece.worker, LayerRange(hops[-1].layers.start, piece.layers.stop))
        else:
            hops.append(Hop(piece.worker, piece.layers))
    return tuple(hops)


class _Losses:
    """The losses of a plan.

    Attributes:
        plan: what was running.
        placement: what is left.
        broken: micro-batches that have lost a worker on their way, in the order in which they pass their pipelines.
    """

    def __init__(self, plan: Plan, placement: Placement, costs: CostModel) -> None:
        self.plan = plan
        self.placement = placement
        self._costs = costs
        self._live = frozenset(placement.workers)
        self._work_s: dict[tuple[float, LayerRange | None, bool, int, int], float] = {}
        ways, taken = different_ways(route.hops for route in plan.routes)
        # Micro-batches of each way.
        self._ways = {ways[way]: count for way, count in Counter(taken).items()}
        self._intact = [hops for hops in ways if self._live.issuperset(hop.worker for hop in hops)]
        is_broken = [not self._live.issuperset(hop.worker for hop in hops) for hops in ways]
        passed = Counter[int]()
        broken: list[tuple[int, int]] = []
        for route, way in zip(plan.routes, taken, strict=True):
            if is_broken[way]:
                broken.append((min(passed[hop.worker] for hop in route.hops), route.micro_batch))
                passed.update(hop.worker for hop in route.hops)
        self.broken = [micro_batch for _, micro_batch in sorted(broken)]

    def routes(self, spread: _Spread) -> tuple[Route, ...]:
        """All routes, of which broken ones go by this spread."""
        return tuple(
            Route(route.micro_batch, _joined_hops(spread[route.micro_batch])) if route.micro_batch in spread else route
            for route in self.plan.routes
        )

    def rerouted(self, spread: _Spread) -> Plan:
        """The plan in which broken routes go by this spread."""
        plan, ranges, routes = self.plan, self.placement.ranges, self.routes(spread)
        recompute = {worker: own for worker, own in plan.recompute.items() if worker in ranges}
        fused = plan.fused_workers
        # All pipelines that detours join split their backward if one of them does.
        joined = (own.workers for own in components(routes) if not fused.issuperset(own.workers)) if fused else ()
        fused = fused.intersection(ranges).difference(*joined)
        return Plan(self.placement, routes, plan.split_backward, recompute, fused)

    def detoured(self, *, cut: bool, whole_holders: bool) -> _Spread:
        """Only the lost hops move, in the end to the same load on all that take some of them.

        Args:
            cut: whether a hop may be shared by several workers, which takes more messages.
            whole_holders: whether holders of the whole hop go before those of parts of it.
        """
        load_s = self._loads(self._ways)
        groups: dict[tuple[LayerRange, tuple[int, ...]], list[int]] = defaultdict(list)
        pieces: dict[int, list[_Piece]] = {}
        parts = self.parts(whole_holders=whole_holders)
        for micro_batch in self.broken:
            pieces[micro_batch] = []
            for hop in self.plan.routes[micro_batch].hops:
                if hop.worker in self._live:
                    pieces[micro_batch].append(_Piece(hop.layers, hop.worker))
                else:
                    for part in parts[hop.layers]:
                        groups[part].append(micro_batch)
        for (layers, holders), micro_batches in sorted(groups.items(), key=lambda group: (len(group[0][1]), group[0])):
            for micro_batch, piece in self._shared(micro_batches, layers, holders, load_s, cut=cut):
                pieces[micro_batch].append(piece)
        return {micro_batch: tuple(sorted(own, key=lambda piece: piece.layers)) for micro_batch, own in pieces.items()}

    def parts(self, *, whole_holders: bool) -> dict[LayerRange, list[tuple[LayerRange, tuple[int, ...]]]]:
        """For the layers of each lost hop, the ranges they are cut into, with the workers that hold all of each."""
        lost = {hop.layers for hops in self._ways for hop in hops if hop.worker not in self._live}
        return {
            layers: [(part, self._holders(part)) for part in self._gaps(layers, whole_holders=whole_holders)]
            for layers in sorted(lost)
        }

    def moved(self) -> _Spread | None:
        """Whole micro-batches move to other pipelines, or to new ones of workers that have nothing else to do."""
        intact = {hops: self._ways[hops] for hops in self._intact}
        load_s = self._loads(intact)
        ways = [*intact, *self._chains([worker for worker, load in load_s.items() if load == 0])]
        if not ways:
            return None

        spread: dict[int, tuple[_Piece, ...]] = {}
        for micro_batch in self.broken:
            hops = min(ways, key=lambda way: max(load_s[hop.worker] + self._hop_s(hop) for hop in way))
            for hop in hops:
                load_s[hop.worker] += self._hop_s(hop)
            spread[micro_batch] = tuple(_Piece(hop.layers, hop.worker) for hop in hops)
        return spread

    def _hop_s(self, hop: Hop) -> float:
        return self._seconds(hop.worker, hop.layers.start, hop.layers.stop)

    def _seconds(self, worker: int, start: int, stop: int) -> float:
        """Seconds that `worker` computes for these layers of a micro-batch."""
        recompute = self.plan.recompute.get(worker)
        split = self.plan.splits(worker)
        key = self._costs.pace(worker), recompute, split, start, stop
        if key not in self._work_s:
            halves = OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD
            kinds = (OperationKind.FORWARD, *(halves if split else (OperationKind.BACKWARD,)))
            layers = LayerRange(start, stop)
            self._work_s[key] = sum(self._costs.compute_s(worker, kind, layers, recompute=recompute) for kind in kinds)
        return self._work_s[key]

    def _loads(self, ways: Mapping[tuple[Hop, ...], int]) -> dict[int, float]:
        """Seconds that each live worker computes, when so many micro-batches take these ways."""
        load_s = dict.fromkeys(self.placement.workers, 0.0)
        for hops, count in ways.items():
            for hop in hops:
                if hop.worker in load_s:
                    load_s[hop.worker] += count * self._hop_s(hop)
        return load_s

    def _gaps(self, layers: LayerRange, *, whole_holders: bool) -> Iterator[LayerRange]:
        """`layers` cut where their holders change, or uncut if some worker holds them all and that is enough."""
        if whole_holders and self._holders(layers):
            yield layers
            return
        start = layers.start
        for layer in layers:
            if layer + 1 == layers.stop or self.placement.holders(layer + 1) != self.placement.holders(start):
                yield LayerRange(start, layer + 1)
                start = layer + 1

    def _holders(self, layers: LayerRange) -> tuple[int, ...]:
        holders = self.placement.holders(layers.start)
        return tuple(worker for worker in holders if self.placement.holds(worker, layers))

    def _shared(
        self,
        micro_batches: Sequence[int],
        layers: LayerRange,
        holders: tuple[int, ...],
        load_s: dict[int, float],
        *,
        cut: bool,
    ) -> Iterator[tuple[int, _Piece]]:
        """The workers that run `layers` of each micro-batch, so that the largest load is least.

        The micro-batches are laid end to end and dealt out: each worker takes the next layers, up to a common level.
        """
        count = len(micro_batches)
        chosen = sorted(sorted(holders, key=lambda worker: (load_s[worker], worker))[: _HELPERS * count])

        def dealt(level_s: float) -> list[tuple[int, LayerRange, int]] | None:
            rooms_s = [(worker, level_s - load_s[worker]) for worker in chosen]
            return self._dealt(count, layers, rooms_s, cut=cut)

        low_s = min(load_s[worker] for worker in chosen)
        own_s = {worker: self._seconds(worker, layers.start, layers.stop) for worker in chosen}
        high_s = min(load_s[worker] + count * own_s[worker] for worker in chosen) * (1 + ROUNDING)
        for _ in range(_BISECTIONS):
            level_s = (low_s + high_s) / 2
            low_s, high_s = (level_s, high_s) if dealt(level_s) is None else (low_s, level_s)
        pieces = dealt(high_s) or []
        order = _order(pieces, layers)
        for number, part, worker in pieces:
            load_s[worker] += self._hop_s(Hop(worker, part))
            yield micro_batches[order[number]], _Piece(part, worker, holders)

    def _dealt(
        self, count: int, layers: LayerRange, rooms_s: Iterable[tuple[int, float]], *, cut: bool
    ) -> list[tuple[int, LayerRange, int]] | None:
        """For each piece the number of its micro-batch, its layers and its worker; None if there is too little time.

        Each worker takes as many of the next layers as it can run in its time.
        """
        dealt: list[tuple[int, LayerRange, int]] = []
        number, start = 0, layers.start
        for worker, room_s in rooms_s:
            while number < count:
                least = start + 1 if cut else layers.stop
                stop = layers.stop
                while stop >= least and self._seconds(worker, start, stop) > room_s:
                    stop -= 1
                if stop < least:
                    break
                dealt.append((number, LayerRange(start, stop), worker))
                if stop < layers.stop:
                    start = stop
                    break
                room_s -= self._seconds(worker, start, stop)
                number, start = number + 1, layers.start
        return dealt if number == count else None

    def _chains(self, idle: Sequence[int]) -> Iterator[tuple[Hop, ...]]:
        """Pipelines of idle workers, each in one; at every layer, the worker that holds most of the next layers."""
        left = set(idle)
        while True:
            hops: list[Hop] = []
            layer = 0
            while layer < self.placement.num_layers:
                following = [
                    Hop(worker, LayerRange(layer, held.stop))
                    for worker in sorted(left)
                    for held in self.placement.ranges_of(worker)
                    if layer in held
                ]
                if not following:
                    return
                hops.append(max(following, key=lambda hop: hop.layers.stop))
                left.remove(hops[-1].worker)
                layer = hops[-1].layers.stop
            yield tuple(hops)


def _order(dealt: Sequence[tuple[int, LayerRange, int]], layers: LayerRange) -> list[int]:
    """For each number of a micro-batch its place: those of one worker evenly over all, cut ones in the middle.

    The middle, because a way through more workers takes longer, which the first and the last have to wait for.
    """
    uncut: dict[int, list[int]] = defaultdict(list)
    key: dict[int, tuple[float, int]] = {}
    for number, part, worker in dealt:
        if part == layers:
            uncut[worker].append(number)
        else:
            key[number] = 0.5, -1
    for worker, numbers in uncut.items():
        for place, number in enumerate(numbers):
            key[number] = (place + 0.5) / len(numbers), worker
    order = [0] * len(key)
    for place, number in enumerate(sorted(key, key=lambda number: (key[number], number))):
        order[number] = place
    return order
