"""Plans with detours: other holders of the lost workers' layers take over their micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, groupby
from typing import Final, TypeAlias

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import CostModel, InFlightLimit, OperationKind
from chameleon_ft.schedule.best import DEFAULT_EFFORT, ListSchedules, Problem, best_parts, step_s_of
from chameleon_ft.schedule.list_scheduler import schedule
from chameleon_ft.schedule.network import builder_of
from chameleon_ft.schedule.records import components, distinct_paths

# Most workers that take over, by lost micro-batch: more would gain little, and all pipelines that take part wait for
# each other.
_HELPERS: Final = 2
_BISECTIONS: Final = 30

Seconds = Callable[[int, int, int], float]
"""Returns the seconds that a worker computes for one micro-batch on layers start to stop."""


def shared_hops(
    micro_batches: Sequence[int],
    layers: LayerRange,
    holders: Iterable[int],
    load_s: MutableMapping[int, float],
    seconds: Seconds,
    *,
    cut: bool,
) -> Iterator[tuple[int, Hop]]:
    """Yield (micro-batch, hop) for `layers` of each micro-batch, so that the largest load is least.

    The micro-batches are laid end to end. Each worker takes the next layers up to a common level of load, which is
    found by bisection.

    Args:
        holders: workers that hold all these layers.
        load_s: worker -> seconds that it computes in any case; the hops are added.
        seconds: cost of a hop.
        cut: several workers may share a hop, which takes more messages.
    """
    count = len(micro_batches)
    chosen = sorted(sorted(holders, key=lambda worker: (load_s[worker], worker))[: _HELPERS * count])
    low_s = min(load_s[worker] for worker in chosen)
    own_s = {worker: seconds(worker, layers.start, layers.stop) for worker in chosen}
    high_s = min(load_s[worker] + count * own_s[worker] for worker in chosen) * (1 + ROUNDING)

    def dealt(level_s: float) -> list[tuple[int, LayerRange, int]] | None:
        rooms_s = [(worker, level_s - load_s[worker]) for worker in chosen]
        return _dealt(count, layers, rooms_s, seconds, cut=cut)

    for _ in range(_BISECTIONS):
        level_s = (low_s + high_s) / 2
        low_s, high_s = (level_s, high_s) if dealt(level_s) is None else (low_s, level_s)
    pieces = dealt(high_s) or []
    order = _order(pieces, layers)
    for number, part, worker in pieces:
        load_s[worker] += seconds(worker, part.start, part.stop)
        yield micro_batches[order[number]], Hop(worker, part)


def _dealt(
    count: int, layers: LayerRange, rooms_s: Iterable[tuple[int, float]], seconds: Seconds, *, cut: bool
) -> list[tuple[int, LayerRange, int]] | None:
    """Return (micro-batch number, layers, worker) of each piece; None if the time is too short.

    Each worker takes as many of the next layers as fit its time.
    """
    dealt: list[tuple[int, LayerRange, int]] = []
    number, start = 0, layers.start
    for worker, room_s in rooms_s:
        while number < count:
            least = start + 1 if cut else layers.stop
            stop = layers.stop
            while stop >= least and seconds(worker, start, stop) > room_s:
                stop -= 1
            if stop < least:
                break
            dealt.append((number, LayerRange(start, stop), worker))
            if stop < layers.stop:
                start = stop
                break
            room_s -= seconds(worker, start, stop)
            number, start = number + 1, layers.start
    return dealt if number == count else None


def _order(dealt: Sequence[tuple[int, LayerRange, int]], layers: LayerRange) -> dict[int, int]:
    """Return the position of each micro-batch, by number: those of one worker spread evenly, cut ones in the middle.

    A route through more workers takes longer, which delays the start or the end of the step if it is first or last.
    """
    uncut: dict[int, list[int]] = defaultdict(list)
    key: dict[int, tuple[float, int]] = {}
    for number, part, worker in dealt:
        if part == layers:
            uncut[worker].append(number)
        else:
            key[number] = 0.5, -1
    for worker, numbers in uncut.items():
        key.update({number: ((place + 0.5) / len(numbers), worker) for place, number in enumerate(numbers)})
    return {number: place for place, number in enumerate(sorted(key, key=lambda number: (key[number], number)))}


# Most operations scheduled in a small plan, to compare a spread and to search for a better one. A plan is small if that
# search has at least `_MIN_TRIALS` trials.
_COMPARE: Final = 6_000
_SEARCH: Final = 8_000
_MIN_TRIALS: Final = 25
# F, and B or I and W.
_OPERATIONS: Final = 3


@dataclass(frozen=True, slots=True)
class _Piece:
    """Layers of a route on a worker; `holders` are all workers that could run them if the original one is lost."""

    layers: LayerRange
    worker: int
    holders: tuple[int, ...] = ()


_Spread: TypeAlias = Mapping[int, tuple[_Piece, ...]]
"""For each micro-batch that has lost a worker, its pieces in the order of layers."""


def reroute(
    plan: Plan,
    lost: Collection[int],
    costs: CostModel,
    *,
    in_flight_limits: Mapping[int, InFlightLimit] | None = None,
    searches: bool = True,
) -> Plan:
    """Return the plan without the lost workers: only their micro-batches move, and no layers.

    Several spreads of these micro-batches are scheduled, and the fastest is taken. Either only the lost hops go to live
    holders of their layers, several to a hop if useful, so that the largest load is least; or whole micro-batches go to
    other pipelines, and to new ones of idle workers. In plans of up to a few hundred operations, a local search then
    moves and swaps hops as long as the step gets shorter. Not proven optimal; deterministic. Works on any plan,
    including a rerouted one. Workers outside `plan` are ignored.

    Args:
        plan: the plan that was running.
        lost: ids of the lost workers.
        costs: durations of operations and messages.
        in_flight_limits: limits of each worker; pass the same to `best_program`.
        searches: schedule several spreads; otherwise take the one in which lost hops are shared and the largest load is
            least, which is usually the fastest.

    Raises:
        NoHolderError: some layers have lost their last holder.
        PlanError: the workload and the plan differ in their number of layers.
    """
    placement = plan.placement.without(lost)
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    losses = _Losses(plan, placement, costs)
    if not losses.broken:
        return losses.rerouted({})
    wholes = (True, False) if losses.parts(whole_holders=True) != losses.parts(whole_holders=False) else (True,)
    if not searches:
        detours = [losses.detoured(cut=True, whole_holders=whole) for whole in wholes]
        return losses.rerouted(min(detours, key=losses.busiest_s))
    operations = _OPERATIONS * sum(len(route.hops) for route in plan.routes)
    is_small = operations * _MIN_TRIALS <= _SEARCH
    spreads: list[_Spread] = []
    for cut in (True, False) if is_small else (True,):
        spreads += [losses.detoured(cut=cut, whole_holders=whole) for whole in wholes]
    if (moved := losses.moved()) is not None:
        spreads.append(moved)
    spreads = [spread for number, spread in enumerate(spreads) if spread not in spreads[:number]]
    if is_small:
        spreads += [_improved(spread, losses, costs, in_flight_limits) for spread in spreads[:2]]
    effort = _COMPARE if is_small else DEFAULT_EFFORT
    return min(
        map(losses.rerouted, spreads),
        key=lambda each: step_s_of(best_parts(each, costs, in_flight_limits=in_flight_limits, effort=effort)),
    )


def _improved(
    start: _Spread, losses: _Losses, costs: CostModel, in_flight_limits: Mapping[int, InFlightLimit] | None
) -> _Spread:
    """Return `start` after moves and swaps of pieces that shorten the step, by the best heuristics first."""
    builder = builder_of(losses.rerouted(start), costs)
    paths = distinct_paths(route.hops for route in losses.routes(start))
    tried = ListSchedules(Problem.of(builder, *paths, in_flight_limits))
    best, step_s = start, tried.search().step_s
    operations = tried.effort
    for rules in [found.rules for found in tried.schedules]:
        improved = True
        while improved:
            improved = False
            for neighbour in _neighbours(best):
                if operations >= _SEARCH:
                    return best
                paths = distinct_paths(route.hops for route in losses.routes(neighbour))
                found = schedule(builder.network(*paths), rules)
                operations += len(found.codes)
                if found.step_s < step_s * (1 - ROUNDING):
                    best, step_s, improved = neighbour, found.step_s, True
                    break
    return best


def _neighbours(spread: _Spread) -> Iterator[_Spread]:
    """Yield spreads in which one piece has moved to another worker, or two have swapped workers."""
    pieces = {
        (micro_batch, index): piece
        for micro_batch, own in sorted(spread.items())
        for index, piece in enumerate(own)
        if piece.holders
    }
    moves = ({place: worker} for place, own in pieces.items() for worker in own.holders if worker != own.worker)
    swaps = (
        {one: b.worker, other: a.worker}
        for (one, a), (other, b) in combinations(pieces.items(), 2)
        if a.worker != b.worker and b.worker in a.holders and a.worker in b.holders
    )
    for workers in chain(moves, swaps):
        changed = dict(spread)
        for (micro_batch, index), worker in workers.items():
            own = list(changed[micro_batch])
            own[index] = replace(own[index], worker=worker)
            changed[micro_batch] = tuple(own)
        yield changed


class _Losses:
    """The losses of a plan.

    Attributes:
        plan: the plan that was running.
        placement: layers of the live workers.
        broken: micro-batches that have lost a worker on their path, in the order in which they run.
    """

    def __init__(self, plan: Plan, placement: Placement, costs: CostModel) -> None:
        self.plan = plan
        self.placement = placement
        self._costs = costs
        self._live = frozenset(placement.workers)
        self._known_s: dict[tuple[object, ...], float] = {}
        paths, taken = distinct_paths(route.hops for route in plan.routes)
        # Micro-batches that go through the same hops.
        self._counts = {paths[path]: count for path, count in Counter(taken).items()}
        self._intact = {
            hops: n for hops, n in self._counts.items() if self._live.issuperset(own.worker for own in hops)
        }
        passed = Counter[int]()
        broken: list[tuple[int, int]] = []
        for route in plan.routes:
            if route.hops not in self._intact:
                broken.append((min(passed[hop.worker] for hop in route.hops), route.micro_batch))
                passed.update(hop.worker for hop in route.hops)
        self.broken = [micro_batch for _, micro_batch in sorted(broken)]

    def routes(self, spread: _Spread) -> tuple[Route, ...]:
        """Return all routes; broken ones follow this spread."""
        return tuple(
            Route(route.micro_batch, _joined_hops(spread[route.micro_batch])) if route.micro_batch in spread else route
            for route in self.plan.routes
        )

    def rerouted(self, spread: _Spread) -> Plan:
        """Return the plan in which broken routes follow this spread."""
        plan, ranges, routes = self.plan, self.placement.ranges, self.routes(spread)
        recompute = {worker: own for worker, own in plan.recompute.items() if worker in ranges}
        fused = plan.fused_workers
        # Pipelines joined by detours all split their backward if any does.
        joined = (own.workers for own in components(routes) if not fused.issuperset(own.workers)) if fused else ()
        fused = fused.intersection(ranges).difference(*joined)
        return Plan(self.placement, routes, plan.split_backward, recompute, fused)

    def detoured(self, *, cut: bool, whole_holders: bool) -> _Spread:
        """Move only the lost hops, and level the load of the workers that take them.

        Args:
            cut: several workers may share a hop, which takes more messages.
            whole_holders: prefer holders of the whole hop to holders of parts.
        """
        load_s = self._loads(self._counts)
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
            for micro_batch, hop in shared_hops(micro_batches, layers, holders, load_s, self._seconds, cut=cut):
                pieces[micro_batch].append(_Piece(hop.layers, hop.worker, holders))
        return {micro_batch: tuple(sorted(own, key=lambda piece: piece.layers)) for micro_batch, own in pieces.items()}

    def parts(self, *, whole_holders: bool) -> dict[LayerRange, list[tuple[LayerRange, tuple[int, ...]]]]:
        """Return the ranges into which each lost hop is cut, with the workers that hold each range.

        A hop is cut where the holders of its layers change; with `whole_holders`, not if some worker holds all layers.
        """
        holders = self.placement.holders
        found: dict[LayerRange, list[tuple[LayerRange, tuple[int, ...]]]] = {}
        for layers in sorted({hop.layers for hops in self._counts for hop in hops if hop.worker not in self._live}):
            whole = whole_holders and self._holders(layers)
            inner = [] if whole else [each for each in list(layers)[1:] if holders(each) != holders(each - 1)]
            ranges = map(LayerRange, (layers.start, *inner), (*inner, layers.stop))
            found[layers] = [(part, self._holders(part)) for part in ranges]
        return found

    def moved(self) -> _Spread | None:
        """Move whole micro-batches to other pipelines, or to new ones of idle workers; None if there are none."""
        load_s = self._loads(self._intact)
        paths = [*self._intact, *self._chains([worker for worker, load in load_s.items() if load == 0])]
        if not paths:
            return None
        spread: dict[int, tuple[_Piece, ...]] = {}
        for micro_batch in self.broken:
            hops = min(paths, key=lambda path: max(load_s[hop.worker] + self._hop_s(hop) for hop in path))
            for hop in hops:
                load_s[hop.worker] += self._hop_s(hop)
            spread[micro_batch] = tuple(_Piece(hop.layers, hop.worker) for hop in hops)
        return spread

    def busiest_s(self, spread: _Spread) -> float:
        """Return the largest load of a worker in a step, in seconds."""
        return max(self._loads(Counter(route.hops for route in self.routes(spread))).values())

    def _hop_s(self, hop: Hop) -> float:
        return self._seconds(hop.worker, hop.layers.start, hop.layers.stop)

    def _seconds(self, worker: int, start: int, stop: int) -> float:
        """Return the seconds that `worker` takes to compute one micro-batch on these layers."""
        recompute, split = self.plan.recompute.get(worker), self.plan.splits(worker)
        key = self._costs.pace(worker), recompute, split, start, stop
        if key not in self._known_s:
            halves = (OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD) if split else (OperationKind.BACKWARD,)
            layers = LayerRange(start, stop)
            self._known_s[key] = sum(
                self._costs.compute_s(worker, kind, layers, recompute=recompute)
                for kind in (OperationKind.FORWARD, *halves)
            )
        return self._known_s[key]

    def _loads(self, paths: Mapping[tuple[Hop, ...], int]) -> dict[int, float]:
        """Return the seconds that each live worker computes, given the number of micro-batches on each path."""
        load_s = dict.fromkeys(self.placement.workers, 0.0)
        for hops, count in paths.items():
            for hop in hops:
                if hop.worker in load_s:
                    load_s[hop.worker] += count * self._hop_s(hop)
        return load_s

    def _holders(self, layers: LayerRange) -> tuple[int, ...]:
        holders = self.placement.holders(layers.start)
        return tuple(worker for worker in holders if self.placement.holds(worker, layers))

    def _chains(self, idle: Sequence[int]) -> Iterator[tuple[Hop, ...]]:
        """Yield disjoint pipelines of idle workers: at each layer, the worker whose range reaches furthest is next."""
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


def _joined_hops(pieces: Iterable[_Piece]) -> tuple[Hop, ...]:
    """Return the pieces of a route as hops, with neighbours on the same worker merged."""
    hops: list[Hop] = []
    for worker, own in groupby(pieces, key=lambda piece: piece.worker):
        layers = [piece.layers for piece in own]
        hops.append(Hop(worker, LayerRange(layers[0].start, layers[-1].stop)))
    return tuple(hops)
