"""Plans between rerouting and a full re-partition: whole pipelines stay, and only broken ones are cut anew.

Only workers of broken pipelines receive layers; the shares of the micro-batches change for all pipelines.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from heapq import heapify, heapreplace
from typing import Final, TypeAlias

import numpy as np

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.search.bounds import CutPoints
from chameleon_ft.search.pipelines import PipelineScheduler, PipelineSearch, PipelineSpec, TimedPipeline
from chameleon_ft.search.placement import Candidate, GradientSync, PlacedPipelines
from chameleon_ft.search.polish import Polish
from chameleon_ft.search.result import DEFAULT_EFFORT, FoundPlan, SearchOptions
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import Shape, WorkerPool, merged_clusters

# Share by which the bound of a cut that moves less may exceed the least bound.
_NEAR: Final = 0.02
# Most micro-batches that move from the pipeline that ends last to the one that ends first.
_SHIFTS: Final = 8

_Cut: TypeAlias = tuple[Shape, CutPoints, tuple[int, ...]]
"""A pipeline without its share: shape, cut points and workers."""


def recut_plan(
    costs: CostModel, current: Placement, *, split_backward: bool, effort: int | None = DEFAULT_EFFORT
) -> FoundPlan | None:
    """Return the plan that keeps whole pipelines of `current` and cuts the rest of broken ones anew.

    Workers without layers fill gaps, first in broken pipelines, then in pipelines with fewer stages than others;
    workers left over form pipelines of their own. None if no pipeline is whole, a worker holds several ranges, or
    memory or the number of micro-batches forbids it.

    Args:
        costs: costs of the workload on the live workers.
        current: layers that workers hold; lost workers are ignored.
        split_backward: backward is split in two.
        effort: approximate number of operations to schedule; see `find_plan`.

    Raises:
        ConfigError: a live worker of `current` is not in the cluster.
    """
    if not costs.cluster.workers:
        return None
    merged = CostModel(costs.workload, next(merged_clusters(costs.cluster)))
    options = SearchOptions.of(effort)
    pool = WorkerPool.of(merged.cluster)
    stages = Stages(merged, pool.classes, split_backward=split_backward)
    search, sync = PipelineSearch(PipelineScheduler(stages, pool, options), options), GradientSync(merged)
    pipelines = recut(current, search, merged, options)
    if pipelines is None:
        return None
    pipelines = Polish([search], sync, merged.cluster, options).with_best_programs(pipelines)
    return Candidate("recut", pipelines, sync.step_s(pipelines), merged, current).found_on(costs)


def recut(
    current: Placement, search: PipelineSearch, costs: CostModel, options: SearchOptions
) -> PlacedPipelines | None:
    """Return the pipelines of `recut_plan`, scheduled by `search`."""
    class_of = search.scheduler.pool.class_of()
    live = current.without([worker for worker in current.workers if worker not in class_of])
    if any(len(ranges) != 1 for ranges in live.ranges.values()):
        return None
    held = {worker: layers for worker, (layers,) in live.ranges.items()}
    whole: list[tuple[int, ...]] = []
    # The layers of workers that are free for new pipelines; their stages should be near these.
    wanted: dict[int, LayerRange] = {}
    for chain in _chains(held, costs.cluster):
        if held[chain[0]].start == 0 and held[chain[-1]].stop == live.num_layers:
            whole.append(chain)
        else:
            wanted |= {worker: held[worker] for worker in chain}
    if not whole:
        return None
    depth = max(map(len, whole))
    idle = sorted(class_of.keys() - held.keys())
    # Shortened pipelines grow again while more workers are idle than the broken ones need.
    while len(idle) > -len(wanted) % depth and len(whole) > 1 and len(shortest := min(whole, key=len)) < depth:
        whole.remove(shortest)
        wanted |= {worker: held[worker] for worker in shortest}
    # An idle worker takes the stage, of a whole pipeline, whose layers the fewest other workers will hold.
    holders = Counter(layer for layers in wanted.values() for layer in layers)
    stages = [held[worker] for worker in max(whole, key=len)]
    for worker in idle:
        wanted[worker] = min(stages, key=lambda stage: (sum(holders[layer] for layer in stage), stage))
        holders.update(wanted[worker])
    left = sorted(wanted, key=lambda worker: (wanted[worker].start + wanted[worker].stop, worker))
    kept = sum(map(len, whole))
    number = max(1, round(len(left) * len(whole) / kept)) if left else 0
    cuts: list[_Cut] = [
        (tuple(class_of[worker] for worker in workers), tuple(held[worker].stop for worker in workers), workers)
        for workers in whole
    ]
    for first in range(number):
        workers = tuple(left[first::number])
        shape = tuple(class_of[worker] for worker in workers)
        share = max(1, costs.workload.micro_batches * len(workers) // (len(left) + kept))
        cut_points = _nearest_cut(held, wanted, workers, shape, share, search)
        # Workers that cannot hold the model together stay idle.
        if cut_points is not None:
            cuts.append((shape, cut_points, workers))
    return _shared_out(cuts, costs.workload.micro_batches, search, options)


def _chains(held: Mapping[int, LayerRange], cluster: Cluster) -> list[tuple[int, ...]]:
    """Return chains of workers with consecutive layers, each worker in one chain.

    Chains that begin at the first layer are extended first, so that as many as possible are whole; ties join neighbours
    by host and by number.
    """
    # Imported here, because it is slow to import and most searches do not need it.
    from scipy.optimize import linear_sum_assignment

    starts: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for worker, layers in held.items():
        starts[layers.start].append(worker)
        ends[layers.stop].append(worker)
    hosts = cluster.hosts
    after: dict[int, int] = {}
    from_first = set(starts[0])
    # More than the sum of the distances between the numbers of all workers.
    far = float(1 + len(held) * max(held, default=0))
    for boundary, before in sorted(ends.items()):
        behind = starts[boundary]
        if not behind:
            continue
        broken = np.array([[worker not in from_first] for worker in before])
        apart = np.not_equal.outer([hosts[worker] for worker in before], [hosts[worker] for worker in behind])
        distance = np.abs(np.subtract.outer(before, behind) + 1)
        rows, columns = linear_sum_assignment(far**2 * broken + far * apart + distance)
        joined = {before[row]: behind[column] for row, column in zip(rows, columns, strict=True)}
        after |= joined
        from_first.update(b for a, b in joined.items() if a in from_first)
    chains: list[tuple[int, ...]] = []
    for worker in sorted(held.keys() - set(after.values())):
        chain = [worker]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        chains.append(tuple(chain))
    return chains


def _nearest_cut(
    held: Mapping[int, LayerRange],
    wanted: Mapping[int, LayerRange],
    workers: Sequence[int],
    shape: Shape,
    micro_batches: int,
    search: PipelineSearch,
) -> CutPoints | None:
    """Return the cut for which these workers lack the fewest bytes, among a few nearly optimal ones."""
    layers = search.scheduler.stages.costs.workload.layers
    if len(shape) > len(layers):
        return None

    def lacking(cut_points: CutPoints) -> int:
        return sum(
            state_bytes(layers[layer])
            for worker, start, stop in zip(workers, (0, *cut_points), cut_points, strict=False)
            for layer in range(start, stop)
            if worker not in held or layer not in held[worker]
        )

    cuts = list(search.estimates.candidates(shape, micro_batches))
    stops = [wanted[worker].stop for worker in workers]
    as_now = search.estimates.nearest(shape, micro_batches, stops, slack=_NEAR)
    return min(
        cuts if as_now is None else [*cuts, as_now],
        key=lambda cut_points: (lacking(cut_points), cut_points),
        default=None,
    )


def _shared_out(
    cuts: Sequence[_Cut], micro_batches: int, search: PipelineSearch, options: SearchOptions
) -> PlacedPipelines | None:
    """Return the pipelines with shares that let the last one end earliest, by estimates and then by schedules.

    None if they do not fit.
    """

    @cache
    def estimate(shape: Shape, cut_points: CutPoints, share: int) -> tuple[float, tuple[int, ...]]:
        """Return the seconds, infinite if a stage does not fit, and the options of the stages."""
        return min(search.estimates.chosen(shape, cut_points, share), default=(math.inf, ()))

    def scheduled(place: int, share: int) -> TimedPipeline | None:
        shape, cut_points, workers = cuts[place]
        own_s, recompute = estimate(shape, cut_points, share)
        if own_s == math.inf:
            return None
        spec = PipelineSpec(shape, cut_points, recompute, share)
        return search.scheduler.scheduled(spec, effort=options.look_effort, workers=workers)

    # Each micro-batch goes to the pipeline that would end first with it.
    shares = [0] * len(cuts)
    ends = [(estimate(shape, cut_points, 1)[0], place) for place, (shape, cut_points, _) in enumerate(cuts)]
    heapify(ends)
    for _ in range(micro_batches):
        _, place = ends[0]
        shares[place] += 1
        heapreplace(ends, (estimate(*cuts[place][:2], shares[place] + 1)[0], place))
    found: dict[int, TimedPipeline] = {}
    for place, share in enumerate(shares):
        timed = scheduled(place, share) if share else None
        if timed is not None:
            found[place] = timed
        elif share:
            return None
    # Then one moves at a time from the pipeline that ends last to the one that ends first, while that helps.
    for _ in range(_SHIFTS):
        slowest = max(found, key=lambda place: found[place].program_s)
        quickest = min(found, key=lambda place: found[place].program_s)
        if shares[slowest] < 2 or slowest == quickest:
            break
        fewer, more = scheduled(slowest, shares[slowest] - 1), scheduled(quickest, shares[quickest] + 1)
        if fewer is None or more is None or max(fewer.program_s, more.program_s) >= found[slowest].program_s:
            break
        found |= {slowest: fewer, quickest: more}
        shares[slowest] -= 1
        shares[quickest] += 1
    return tuple((each, cuts[place][2]) for place, each in found.items())
