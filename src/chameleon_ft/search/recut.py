"""Between detours and new pipelines: those that are whole stay as they are, and only the broken ones are cut anew.

So only the workers of broken pipelines receive layers, while the shares of the micro-batches change for all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Final

import numpy as np

from chameleon_ft.cluster import Cluster
from chameleon_ft.estimate import state_bytes
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import Pipelines, Stops
from chameleon_ft.search._effort import DEFAULT_EFFORT, look_effort
from chameleon_ft.search._kinds import Crew, Shape, grouped
from chameleon_ft.search._placed import PlacedPipeline, found_plan, polished
from chameleon_ft.search._timed import Timer
from chameleon_ft.search.result import FoundPlan

__all__ = ["recut", "recut_plan"]

# By how much more than the least a cut may take that moves less.
_NEAR: Final = 0.02
# How often a micro-batch goes from the pipeline that ends last to one that would then end earlier.
_SHIFTS: Final = 8

# Kinds of the workers, where stages stop.
_Class = tuple[Shape, Stops]
# First layer, and the one after the last.
_Bounds = tuple[int, int]


def recut_plan(
    costs: CostModel, current: Placement, *, split_backward: bool, effort: int | None = DEFAULT_EFFORT
) -> FoundPlan | None:
    """The plan in which whole pipelines of `current` stay and the rest of broken ones is cut anew, with idle workers.

    Workers that hold nothing fill the gaps, first those of broken pipelines, then those of pipelines that have fewer
    stages than others; what is left of them makes pipelines of its own. None where no pipeline is whole, a worker holds
    several ranges, or memory or the number of micro-batches forbids it.

    Args:
        costs: what is to be computed, and who is left.
        current: which layers workers hold; those that are not left are passed over.
        split_backward: whether backward is split in two.
        effort: operations to schedule, about; see `find_plan`.

    Raises:
        ConfigError: a worker of `current` that is live is not in the cluster.
    """
    cluster = grouped(costs.cluster)
    timer = Timer(CostModel(costs.workload, cluster), Crew.of(cluster), split_backward=split_backward)
    pipelines = recut(current, timer, effort=look_effort(effort))
    return None if pipelines is None else found_plan("recut", polished(pipelines, timer, effort), timer, current)


def recut(current: Placement, timer: Timer, *, effort: int) -> tuple[PlacedPipeline, ...] | None:
    """The pipelines of such a plan, with a timer that is there already."""
    crew, costs = timer.crew, timer.costs
    kind_of = {worker: kind for kind, members in enumerate(crew.members) for worker in members}
    live = current.without([worker for worker in current.workers if worker not in kind_of])
    chains = _chains(live, costs.cluster)
    if chains is None:
        return None
    whole = [chain for chain in chains if _covers(live, chain)]
    if not whole:
        return None
    depth = max(map(len, whole))
    wishes = {worker: _bounds_of(live, worker) for chain in chains if not _covers(live, chain) for worker in chain}
    idle = sorted(kind_of.keys() - set(live.workers))
    # Where workers are there for it, pipelines that have become short grow again.
    while len(idle) > _gaps(wishes, depth) and len(whole) > 1 and len(shortest := min(whole, key=len)) < depth:
        whole.remove(shortest)
        wishes |= {worker: _bounds_of(live, worker) for worker in shortest}
    wishes |= _filling(idle, wishes, [_bounds_of(live, worker) for worker in max(whole, key=len)])
    left = sorted(wishes, key=lambda worker: (sum(wishes[worker]), worker))
    number = max(1, round(len(left) * len(whole) / sum(map(len, whole)))) if left else 0
    micro_batches = costs.workload.micro_batches
    for recompute in (False, True):
        cuts = timer.recomputing if recompute else timer.pipelines
        if cuts is None:
            continue
        pipelines: list[tuple[_Class, tuple[int, ...]]] = []
        for workers in whole:
            shape = tuple(kind_of[worker] for worker in workers)
            pipelines.append(((shape, tuple(_bounds_of(live, worker)[1] for worker in workers)), workers))
        for first in range(number):
            workers = tuple(left[first::number])
            shape = tuple(kind_of[worker] for worker in workers)
            share = max(1, micro_batches * len(workers) // (len(left) + sum(map(len, whole))))
            stops = _nearest_cut(live, wishes, workers, shape, share, cuts)
            # Those that cannot hold a model among them stay idle.
            if stops is not None:
                pipelines.append(((shape, stops), workers))
        shares = _Shares([own for own, _ in pipelines], timer, cuts, effort, recompute=recompute).even(micro_batches)
        if shares is not None:
            return tuple(
                PlacedPipeline(timer.timed(workers, *own, count, recompute=recompute, effort=effort), workers)
                for (own, workers), count in zip(pipelines, shares, strict=True)
                if count
            )
    return None


def _gaps(wishes: dict[int, _Bounds], depth: int) -> int:
    """Workers that lack to make whole pipelines of what is left."""
    return -len(wishes) % depth


def _filling(idle: Sequence[int], wishes: dict[int, _Bounds], stages: Sequence[_Bounds]) -> dict[int, _Bounds]:
    """For each idle worker the stage of a whole pipeline that the fewest of the others stand for."""
    layers = Counter(layer for start, stop in wishes.values() for layer in range(start, stop))
    found: dict[int, _Bounds] = {}
    for worker in idle:
        found[worker] = min(stages, key=lambda stage: (sum(layers[each] for each in range(*stage)), stage))
        layers.update(range(*found[worker]))
    return found


def _chains(live: Placement, cluster: Cluster) -> list[tuple[int, ...]] | None:
    """Workers whose layers follow each other, each in one chain; None if a worker holds several ranges.

    Chains from the first layer on go before others, so that as many as can be are whole; where there is a choice,
    neighbours by host and by number are joined.
    """
    starts: dict[int, list[int]] = defaultdict(list)
    stops: dict[int, list[int]] = defaultdict(list)
    for worker, ranges in live.ranges.items():
        if len(ranges) != 1:
            return None
        starts[ranges[0].start].append(worker)
        stops[ranges[0].stop].append(worker)
    hosts = {worker.id: worker.host for worker in cluster.workers}
    after: dict[int, int] = {}
    from_first = set(starts.get(0, ()))
    for boundary, before in sorted(stops.items()):
        behind = starts.get(boundary, [])
        joined: dict[int, int] = {}
        for a, b in _nearest_pairs(before, behind, hosts, from_first):
            if a not in after and b not in joined:
                after[a], joined[b] = b, a
                if len(joined) == min(len(before), len(behind)):
                    break
        from_first.update(b for b, a in joined.items() if a in from_first)
    firsts = sorted(set(live.workers) - set(after.values()))
    chains: list[tuple[int, ...]] = []
    for worker in firsts:
        chain = [worker]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        chains.append(tuple(chain))
    return chains


def _nearest_pairs(
    before: Sequence[int], behind: Sequence[int], hosts: Mapping[int, str], from_first: Collection[int]
) -> Iterator[tuple[int, int]]:
    """All pairs of the two, as they are to be joined: first from chains that begin at the first layer."""
    if not before or not behind:
        return iter(())
    a, b = (each.ravel() for each in np.meshgrid(before, behind, indexing="ij"))
    numbers = {host: number for number, host in enumerate(set(hosts.values()))}
    apart = np.not_equal(
        *(
            each.ravel()
            for each in np.meshgrid(
                [numbers[hosts[worker]] for worker in before],
                [numbers[hosts[worker]] for worker in behind],
                indexing="ij",
            )
        )
    )
    broken = np.repeat([worker not in from_first for worker in before], len(behind))
    order = np.lexsort((b, a, np.abs(b - a - 1), apart, broken))
    return zip(a[order].tolist(), b[order].tolist(), strict=True)


def _bounds_of(placement: Placement, worker: int) -> _Bounds:
    (layers,) = placement.ranges_of(worker)
    return layers.start, layers.stop


def _covers(placement: Placement, chain: Sequence[int]) -> bool:
    return _bounds_of(placement, chain[0])[0] == 0 and _bounds_of(placement, chain[-1])[1] == placement.num_layers


def _nearest_cut(
    live: Placement,
    wishes: Mapping[int, _Bounds],
    workers: Sequence[int],
    shape: Shape,
    micro_batches: int,
    pipelines: Pipelines,
) -> Stops | None:
    """Of a few cuts that are nearly as fast as can be, the one for which these workers lack the least."""
    if len(shape) > pipelines.num_layers:
        return None
    bounds = pipelines.unsynced
    state = [state_bytes(layer) for layer in pipelines.layers]
    ends = [wishes[worker][1] for worker in workers]

    def lacking(stops: Stops) -> int:
        starts = (0, *stops[:-1])
        return sum(
            state[layer]
            for worker, start, stop in zip(workers, starts, stops, strict=True)
            for layer in LayerRange(start, stop)
            if not any(layer in held for held in live.ranges.get(worker, ()))
        )

    cuts = bounds.candidates(shape, micro_batches)
    as_now = bounds.nearest(shape, micro_batches, ends, slack=_NEAR)
    return min(cuts if as_now is None else [*cuts, as_now], key=lambda stops: (lacking(stops), stops), default=None)


class _Shares:
    """How many micro-batches each of some pipelines gets, so that the last ends first."""

    def __init__(
        self, pipelines: Sequence[_Class], timer: Timer, cuts: Pipelines, effort: int, *, recompute: bool
    ) -> None:
        self._pipelines = pipelines
        self._counts = Counter(pipelines)
        self._timer = timer
        self._cuts = cuts
        self._effort = effort
        self._recompute = recompute
        self._bounds = cuts.unsynced
        self._known_s: dict[_Class, dict[int, float]] = {own: {} for own in self._counts}

    def even(self, micro_batches: int) -> list[int] | None:
        """By their bounds, and then by their programs; None if they cannot hold so many."""
        low, high = 0.0, 1.0
        while self._total(high, micro_batches) < micro_batches:
            low, high = high, 2 * high
            if high > 1e12:
                return None
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            if self._total(middle, micro_batches) >= micro_batches:
                high = middle
            else:
                low = middle
        most = {own: self._most(own, high, micro_batches) for own in self._counts}
        shares = [most[own] for own in self._pipelines]
        # Those that would end last, the last of equals first.
        ends_s = map(self._bound_s, self._pipelines, shares)
        slowest = [(-end_s, -place) for place, end_s in enumerate(ends_s)]
        heapify(slowest)
        for _ in range(sum(shares) - micro_batches):
            place = -slowest[0][1]
            shares[place] -= 1
            heapreplace(slowest, (-self._bound_s(self._pipelines[place], shares[place]), -place))
        return self._shifted(shares)

    def _shifted(self, shares: list[int]) -> list[int]:
        """One at a time from the last to end to the first, as long as that makes the step shorter."""
        for _ in range(_SHIFTS):
            times_s = [self._time_s(place, count) for place, count in enumerate(shares)]
            slowest = max(range(len(shares)), key=times_s.__getitem__)
            quickest = min(range(len(shares)), key=times_s.__getitem__)
            if not self._fits(quickest, shares[quickest] + 1):
                break
            changed = list(shares)
            changed[slowest] -= 1
            changed[quickest] += 1
            worst_s = max(self._time_s(slowest, changed[slowest]), self._time_s(quickest, changed[quickest]))
            if worst_s >= times_s[slowest]:
                break
            shares = changed
        return shares

    def _total(self, time_s: float, enough: int) -> int:
        return sum(count * self._most(own, time_s, enough) for own, count in self._counts.items())

    def _most(self, own: _Class, time_s: float, enough: int) -> int:
        low, high = 0, enough
        while low < high:
            middle = (low + high + 1) // 2
            if self._bound_s(own, middle) <= time_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _bound_s(self, own: _Class, count: int) -> float:
        """Infinite where so many do not fit."""
        if not count:
            return 0.0
        # Most pipelines are alike, and all are asked for again whenever one gets another share.
        known = self._known_s[own]
        found = known.get(count)
        if found is None:
            fits = self._cuts.fits(*own, count)
            found = known[count] = self._bounds.bound_s(*own, count) if fits else math.inf
        return found

    def _time_s(self, place: int, count: int) -> float:
        if not count:
            return 0.0
        shape, stops = self._pipelines[place]
        timed = self._timer.sample(shape, stops, count, recompute=self._recompute, effort=self._effort)
        return timed.program_s

    def _fits(self, place: int, count: int) -> bool:
        return self._cuts.fits(*self._pipelines[place], count)
