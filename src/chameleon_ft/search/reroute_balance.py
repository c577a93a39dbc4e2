"""Where the layers of lost workers are run instead: on the live workers that hold them, as evenly as can be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from chameleon_ft.plan import Hop, LayerRange, Placement, Plan
from chameleon_ft.schedule import CostModel, OperationKind

__all__ = ["Losses", "Piece", "Spread", "joined_hops"]

# So many workers at most share the micro-batches of a lost one, for each of these. What more of them could take off
# each other is little, and all pipelines that take part wait for each other.
_HELPERS: Final = 2
_BISECTIONS: Final = 30
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers of a route on a worker; `holders` are all that could run them, where they have lost their own."""

    layers: LayerRange
    worker: int
    holders: tuple[int, ...] = ()


# For each micro-batch that has lost a worker, its pieces in the order of layers.
Spread = Mapping[int, tuple[Piece, ...]]


def joined_hops(pieces: Iterable[Piece]) -> tuple[Hop, ...]:
    """The pieces of a route as hops; neighbours on the same worker are one."""
    hops: list[Hop] = []
    for piece in pieces:
        if hops and hops[-1].worker == piece.worker:
            hops[-1] = Hop(piece.worker, LayerRange(hops[-1].layers.start, piece.layers.stop))
        else:
            hops.append(Hop(piece.worker, piece.layers))
    return tuple(hops)


class _Seconds(dict[tuple[int, int], float]):
    """That a worker computes for the layers from one to before another, worked out when they are asked for."""

    def __init__(self, plan: Plan, costs: CostModel, worker: int) -> None:
        super().__init__()
        halves = OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD
        self._kinds = (OperationKind.FORWARD, *(halves if plan.split_backward else (OperationKind.BACKWARD,)))
        self._costs = costs
        self._worker = worker
        self._recompute = plan.recompute.get(worker)

    def __missing__(self, key: tuple[int, int]) -> float:
        layers = LayerRange(*key)
        found = sum(
            self._costs.compute_s(self._worker, kind, layers, recompute=self._recompute) for kind in self._kinds
        )
        self[key] = found
        return found


class Losses:
    """What is lost of a plan.

    Attributes:
        plan: what was running.
        placement: what is left.
        broken: micro-batches that have lost a worker on their way, in the order in which they pass their pipelines.
    """

    def __init__(self, plan: Plan, placement: Placement, costs: CostModel) -> None:
        self.plan = plan
        self.placement = placement
        self._costs = costs
        self._seconds: dict[int, _Seconds] = {}
        self._by_kind: dict[tuple[float, LayerRange | None], _Seconds] = {}
        self._ways = Counter[tuple[Hop, ...]]()
        self._live = live = frozenset(placement.workers)
        # By identity, for hops are slow to hash.
        ways: dict[int, tuple[tuple[Hop, ...], bool, list[int]]] = {}
        passed = Counter[int]()
        broken: list[tuple[int, int]] = []
        for route in plan.routes:
            hops = route.hops
            if id(hops) not in ways:
                workers = [hop.worker for hop in hops]
                ways[id(hops)] = hops, live.issuperset(workers), []
            _, intact, micro_batches = ways[id(hops)]
            micro_batches.append(route.micro_batch)
            if not intact:
                broken.append((min(passed[hop.worker] for hop in hops), route.micro_batch))
                passed.update(hop.worker for hop in hops)
        self.broken = [micro_batch for _, micro_batch in sorted(broken)]
        for hops, _, micro_batches in ways.values():
            self._ways[hops] += len(micro_batches)
        self._intact = [hops for hops in self._ways if live.issuperset(hop.worker for hop in hops)]

    def detoured(self, *, cut: bool, whole_holders: bool) -> Spread:
        """Only the lost hops move, in the end to the same load on all that take some of them.

        Args:
            cut: whether a hop may be shared by several workers, which takes more messages.
            whole_holders: whether holders of the whole hop go before those of parts of it.
        """
        load_s = self._loads(self._ways)
        groups: dict[tuple[LayerRange, tuple[int, ...]], list[int]] = defaultdict(list)
        pieces: dict[int, list[Piece]] = {}
        parts = self.parts(whole_holders=whole_holders)
        for micro_batch in self.broken:
            pieces[micro_batch] = []
            for hop in self.plan.routes[micro_batch].hops:
                if hop.worker in self._live:
                    pieces[micro_batch].append(Piece(hop.layers, hop.worker))
                else:
                    for part in parts[hop.layers]:
                        groups[part].append(micro_batch)
        for (layers, holders), micro_batches in sorted(groups.items(), key=lambda group: (len(group[0][1]), group[0])):
            for micro_batch, piece in self._shared(micro_batches, layers, holders, load_s, cut=cut):
                pieces[micro_batch].append(piece)
        return {micro_batch: tuple(sorted(own, key=lambda piece: piece.layers)) for micro_batch, own in pieces.items()}

    def parts(self, *, whole_holders: bool) -> dict[LayerRange, list[tuple[LayerRange, tuple[int, ...]]]]:
        """For the layers of each lost hop what they are cut into, with the workers that hold all of that."""
        lost = {hop.layers for hops in self._ways for hop in hops if hop.worker not in self._live}
        return {
            layers: [(part, self._holders(part)) for part in self._gaps(layers, whole_holders=whole_holders)]
            for layers in sorted(lost)
        }

    def moved(self) -> Spread | None:
        """Whole micro-batches move to other pipelines, or to new ones of workers that have nothing else to do."""
        intact = {hops: self._ways[hops] for hops in self._intact}
        load_s = self._loads(intact)
        ways = [*intact, *self._chains([worker for worker, load in load_s.items() if load == 0])]
        if not ways:
            return None

        def after_s(way: int) -> float:
            return max(load_s[hop.worker] + self.work_s(hop.worker, hop.layers) for hop in ways[way])

        queue = [(after_s(way), way) for way in range(len(ways))]
        heapify(queue)
        spread: dict[int, tuple[Piece, ...]] = {}
        for micro_batch in self.broken:
            known_s, way = heappop(queue)
            while known_s != (now_s := after_s(way)):
                heappush(queue, (now_s, way))
                known_s, way = heappop(queue)
            for hop in ways[way]:
                load_s[hop.worker] += self.work_s(hop.worker, hop.layers)
            heappush(queue, (after_s(way), way))
            spread[micro_batch] = tuple(Piece(hop.layers, hop.worker) for hop in ways[way])
        return spread

    def work_s(self, worker: int, layers: LayerRange) -> float:
        """Seconds that `worker` computes for these layers of a micro-batch."""
        return self._seconds_of(worker)[layers.start, layers.stop]

    def _seconds_of(self, worker: int) -> _Seconds:
        """Those of all layers, which workers of a kind share."""
        found = self._seconds.get(worker)
        if found is None:
            kind = self._costs.cluster.worker(worker).speed, self.plan.recompute.get(worker)
            if kind not in self._by_kind:
                self._by_kind[kind] = _Seconds(self.plan, self._costs, worker)
            found = self._seconds[worker] = self._by_kind[kind]
        return found

    def _loads(self, ways: Mapping[tuple[Hop, ...], int]) -> dict[int, float]:
        """Seconds that each live worker computes, when so many micro-batches take these ways."""
        load_s = dict.fromkeys(self.placement.workers, 0.0)
        for hops, count in ways.items():
            for hop in hops:
                if hop.worker in load_s:
                    load_s[hop.worker] += count * self.work_s(hop.worker, hop.layers)
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
    ) -> Iterator[tuple[int, Piece]]:
        """Who runs `layers` of which micro-batch, with as little as can be for the one that has most to do then.

        The micro-batches are laid end to end and dealt out: each worker takes the next layers, up to a common level.
        """
        count = len(micro_batches)
        chosen = sorted(sorted(holders, key=lambda worker: (load_s[worker], worker))[: _HELPERS * count])
        helpers = [(worker, load_s[worker], self._seconds_of(worker)) for worker in chosen]
        low_s = min(load for _, load, _ in helpers)
        high_s = min(load + count * own_s[layers.start, layers.stop] for _, load, own_s in helpers) * (1 + _ROUNDING)
        for _ in range(_BISECTIONS):
            level_s = (low_s + high_s) / 2
            if _dealt(count, layers, helpers, level_s, cut=cut) is None:
                low_s = level_s
            else:
                high_s = level_s
        dealt = _dealt(count, layers, helpers, high_s, cut=cut) or []
        order = _order(dealt, layers)
        for number, part, worker in dealt:
            load_s[worker] += self.work_s(worker, part)
            yield micro_batches[order[number]], Piece(part, worker, holders)

    def _chains(self, idle: Sequence[int]) -> Iterator[tuple[Hop, ...]]:
        """Pipelines that idle workers can make, each in one; at every layer, by whoever holds most of what follows."""
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


def _dealt(
    count: int, layers: LayerRange, helpers: Sequence[tuple[int, float, _Seconds]], level_s: float, *, cut: bool
) -> list[tuple[int, LayerRange, int]] | None:
    """For each piece the number of its micro-batch, its layers and its worker; None if the level is too low.

    Each worker takes as many of the next layers as it can run until then: `helpers` come with what they have to do
    already, and what layers take them.
    """
    dealt: list[tuple[int, LayerRange, int]] = []
    number, start = 0, layers.start
    for worker, load_s, own_s in helpers:
        room_s = level_s - load_s
        while number < count:
            least = layers.stop if not cut else start + 1
            stop = layers.stop
            while stop >= least and own_s[start, stop] > room_s:
                stop -= 1
            if stop < least:
                break
            dealt.append((number, LayerRange(start, stop), worker))
            if stop < layers.stop:
                start = stop
                break
            room_s -= own_s[start, stop]
            number, start = number + 1, layers.start
    return dealt if number == count else None


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
