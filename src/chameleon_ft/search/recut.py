"""Between rerouting and new pipelines: whole pipelines stay as they are, and only the broken ones are cut anew.

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
from chameleon_ft.search.bounds import Stops
from chameleon_ft.search.candidates import Candidate, PlacedPipelines
from chameleon_ft.search.gradient_sync import GradientSync
from chameleon_ft.search.options import DEFAULT_EFFORT, SearchOptions
from chameleon_ft.search.pipelines import PipelineSearch
from chameleon_ft.search.polish import Polish
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.search.schedules import PipelineScheduler, PipelineSpec, TimedPipeline
from chameleon_ft.search.worker_classes import Shape, WorkerPool, merged_clusters

__all__ = ["recut", "recut_plan"]

# The share by which a cut that moves less may be above the least bound.
_NEAR: Final = 0.02
# How often a micro-batch goes from the pipeline that ends last to one that would then end earlier.
_SHIFTS: Final = 8
_PRECISION: Final = 1e-4
_FOREVER_S: Final = 1e12

# First layer, and the one after the last.
_Bounds = tuple[int, int]
# A pipeline without its share: shape, stops.
_Cut = tuple[Shape, Stops]


def recut_plan(
    costs: CostModel, current: Placement, *, split_backward: bool, effort: int | None = DEFAULT_EFFORT
) -> FoundPlan | None:
    """The plan in which whole pipelines of `current` stay and the rest of broken ones is cut anew, with idle workers.

    Workers that hold nothing fill the gaps, first those of broken pipelines, then those of pipelines that have fewer
    stages than others; what is left of them makes pipelines of its own. None where no pipeline is whole, a worker holds
    several ranges, or memory or the number of micro-batches forbids it.

    Args:
        costs: costs of the workload on the live workers.
        current: which layers workers hold; those that are not left are passed over.
        split_backward: whether backward is split in two.
        effort: operations to schedule, about; see `find_plan`.

    Raises:
        ConfigError: a worker of `current` that is live is not in the cluster.
    """
    if not costs.cluster.workers:
        return None
    merged = CostModel(costs.workload, next(merged_clusters(costs.cluster)))
    options = SearchOptions(effort)
    scheduler = PipelineScheduler(merged, WorkerPool.of(merged.cluster), options, split_backward=split_backward)
    search, sync = PipelineSearch(scheduler, options), GradientSync(merged)
    pipelines = recut(current, search, merged, options)
    if pipelines is None:
        return None
    pipelines = Polish([search], sync, merged.cluster, options).with_best_programs(pipelines)
    return Candidate("recut", pipelines, sync.step_s(pipelines), merged, current).found_on(costs)


def recut(
    current: Placement, search: PipelineSearch, costs: CostModel, options: SearchOptions
) -> PlacedPipelines | None:
    """The pipelines of such a plan, as `search` schedules them."""
    class_of = search.scheduler.pool.class_of()
    live = current.without([worker for worker in current.workers if worker not in class_of])
    chains = _chains(live, costs.cluster)
    if chains is None:
        return None
    whole = [chain for chain in chains if _covers(live, chain)]
    if not whole:
        return None
    depth = max(map(len, whole))
    wishes = {worker: _bounds_of(live, worker) for chain in chains if not _covers(live, chain) for worker in chain}
    idle = sorted(class_of.keys() - set(live.workers))
    # Where workers are there for it, pipelines that have become short grow again.
    while len(idle) > _gaps(wishes, depth) and len(whole) > 1 and len(shortest := min(whole, key=len)) < depth:
        whole.remove(shortest)
        wishes |= {worker: _bounds_of(live, worker) for worker in shortest}
    wishes |= _filling(idle, wishes, [_bounds_of(live, worker) for worker in max(whole, key=len)])
    left = sorted(wishes, key=lambda worker: (sum(wishes[worker]), worker))
    number = max(1, round(len(left) * len(whole) / sum(map(len, whole)))) if left else 0
    micro_batches = costs.workload.micro_batches
    cuts: list[tuple[_Cut, tuple[int, ...]]] = []
    for workers in whole:
        shape = tuple(class_of[worker] for worker in workers)
        cuts.append(((shape, tuple(_bounds_of(live, worker)[1] for worker in workers)), workers))
    for first in range(number):
        workers = tuple(left[first::number])
        shape = tuple(class_of[worker] for worker in workers)
        share = max(1, micro_batches * len(workers) // (len(left) + sum(map(len, whole))))
        stops = _nearest_cut(live, wishes, workers, shape, share, search)
        # Workers that cannot hold a model together stay idle.
        if stops is not None:
            cuts.append(((shape, stops), workers))
    return _Shares(search, options).even(cuts, micro_batches)


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
    search: PipelineSearch,
) -> Stops | None:
    """Of a few cuts that are nearly as fast as can be, the one for which these workers lack the least."""
    layers = search.scheduler.stages.costs.workload.layers
    if len(shape) > len(layers):
        return None
    state = [state_bytes(layer) for layer in layers]
    ends = [wishes[worker][1] for worker in workers]

    def lacking(stops: Stops) -> int:
        starts = (0, *stops[:-1])
        return sum(
            state[layer]
            for worker, start, stop in zip(workers, starts, stops, strict=True)
            for layer in LayerRange(start, stop)
            if not any(layer in held for held in live.ranges.get(worker, ()))
        )

    cuts = list(search.estimates.candidates(shape, micro_batches))
    as_now = search.estimates.nearest(shape, micro_batches, ends, slack=_NEAR)
    return min(cuts if as_now is None else [*cuts, as_now], key=lambda stops: (lacking(stops), stops), default=None)


class _Shares:
    """Shares the micro-batches out over pipelines that are cut, so that the last of them ends first."""

    def __init__(self, search: PipelineSearch, options: SearchOptions) -> None:
        self._search = search
        self._options = options
        self._known: dict[tuple[_Cut, int], tuple[float, tuple[int, ...]]] = {}

    def even(self, cuts: Sequence[tuple[_Cut, tuple[int, ...]]], micro_batches: int) -> PlacedPipelines | None:
        """The pipelines with their shares, by estimates and then by schedules; None where they do not fit."""
        alike = Counter(cut for cut, _ in cuts)
        low, high = 0.0, 1.0
        while self._total(alike, high, micro_batches) < micro_batches:
            low, high = high, 2 * high
            if high > _FOREVER_S:
                return None
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            if self._total(alike, middle, micro_batches) >= micro_batches:
                high = middle
            else:
                low = middle
        most = {cut: self._most(cut, high, micro_batches) for cut in alike}
        shares = [most[cut] for cut, _ in cuts]
        # Those that would end last, the last of equals first.
        slowest = [(-self._estimate(cut, most[cut])[0], -place) for place, (cut, _) in enumerate(cuts)]
        heapify(slowest)
        for _ in range(sum(shares) - micro_batches):
            place = -slowest[0][1]
            shares[place] -= 1
            heapreplace(slowest, (-self._estimate(cuts[place][0], shares[place])[0], -place))
        pipelines = [
            (self._scheduled(cut, count, workers), workers)
            for (cut, workers), count in zip(cuts, shares, strict=True)
            if count
        ]
        if any(timed is None for timed, _ in pipelines):
            return None
        return self._shifted(tuple((timed, workers) for timed, workers in pipelines if timed is not None))

    def _shifted(self, pipelines: PlacedPipelines) -> PlacedPipelines:
        """Micro-batches go one at a time from the last to end to the first, as long as that makes the step shorter."""
        for _ in range(_SHIFTS):
            times_s = [timed.program_s for timed, _ in pipelines]
            places = [times_s.index(max(times_s)), times_s.index(min(times_s))]
            changed = list(pipelines)
            for place, change in zip(places, (-1, 1), strict=True):
                timed, workers = pipelines[place]
                spec = timed.spec
                if not spec.micro_batches + change:
                    return pipelines
                other = self._scheduled((spec.shape, spec.stops), spec.micro_batches + change, workers)
                if other is None:
                    return pipelines
                changed[place] = other, workers
            if max(changed[place][0].program_s for place in places) >= max(times_s):
                return pipelines
            pipelines = tuple(changed)
        return pipelines

    def _total(self, alike: Mapping[_Cut, int], time_s: float, enough: int) -> int:
        return sum(count * self._most(cut, time_s, enough) for cut, count in alike.items())

    def _most(self, cut: _Cut, time_s: float, enough: int) -> int:
        low, high = 0, enough
        while low < high:
            middle = (low + high + 1) // 2
            if self._estimate(cut, middle)[0] <= time_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _estimate(self, cut: _Cut, count: int) -> tuple[float, tuple[int, ...]]:
        """Estimated seconds of so many micro-batches, infinite if a stage does not fit, and options of the stages.

        A pipeline without micro-batches ends before all others, even if they take no time.
        """
        if not count:
            return -math.inf, ()
        if (cut, count) not in self._known:
            self._known[cut, count] = self._search.estimates.chosen(*cut, count)
        return self._known[cut, count]

    def _scheduled(self, cut: _Cut, count: int, workers: tuple[int, ...]) -> TimedPipeline | None:
        estimate_s, options = self._estimate(cut, count)
        if estimate_s == math.inf:
            return None
        spec = PipelineSpec(*cut, options, count)
        return self._search.scheduler.scheduled(spec, effort=self._options.look_effort, workers=workers)
