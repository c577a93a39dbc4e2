"""Pipelines on workers: which worker takes which stage, gradient sync, figures for choosing, and the plan.

Neighbours of a pipeline, or holders of the same layers, share a host.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, islice, pairwise
from typing import Final, TypeAlias

from chameleon_ft.cluster import Cluster
from chameleon_ft.cost.step import estimate_parts, reduction_times
from chameleon_ft.plan import LayerRange, PipelineLayout, Placement, Plan, RecomputedLayers, pipelines_plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.layouts import pipeline_hops
from chameleon_ft.schedule import CostModel, InFlightLimit, PipelineSchedule, default_limits
from chameleon_ft.schedule.best import DEFAULT_EFFORT as PROGRAM_EFFORT
from chameleon_ft.schedule.best import best_parts
from chameleon_ft.schedule.list_scheduler import limits_of_array
from chameleon_ft.search.bounds import has_gradients
from chameleon_ft.search.pipelines import TimedPipeline
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.search.worker_classes import Shape, WorkerPool, arrangements
from chameleon_ft.sync import gradient_rounds, segment_bytes
from chameleon_ft.transfer import Holding, assign_roles, holdings_of, moved_bytes
from chameleon_ft.workload import LayerCost

PlacedPipelines: TypeAlias = tuple[tuple[TimedPipeline, tuple[int, ...]], ...]
"""Pipelines, each with its workers."""


def links_are_equal(cluster: Cluster) -> bool:
    """Return whether it does not matter which workers share a host, and no link is slow."""
    are_equal = cluster.intra_host == cluster.inter_host or len(cluster.host_sizes) in (1, len(cluster.workers))
    return are_equal and not cluster.slow_links


class GradientSync:
    """Gradient sync of pipelines on workers of a cluster: `estimate_sync` without a plan or a program."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._is_free = not has_gradients(costs.workload)
        self.step_s = cache(self._step_s)
        self._reductions = cache(self._ordered_reductions)

    def _step_s(self, pipelines: PlacedPipelines) -> float:
        """Return the seconds until all operations of the pipelines have ended and all gradients are reduced."""
        program_s = max(timed.program_s for timed, _ in pipelines)
        if self._is_free:
            return program_s
        workers_of = [worker for _, workers in pipelines for worker in workers]
        free_s = dict(enumerate(end_s for timed, _ in pipelines for end_s in timed.ends_s))
        ring_s = self._costs.cluster.ring_all_reduce_s
        reductions = (
            (holders, 0.0, ring_s([workers_of[slot] for slot in holders], num_bytes))
            for holders, num_bytes in self._reductions(tuple(timed.cut_points for timed, _ in pipelines))
        )
        return max([program_s, *(end_s for _, end_s in reduction_times(reductions, free_s))])

    def _ordered_reductions(self, cut_points: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], int]]:
        """Return (holders, bytes) of all reductions of pipelines with these cuts, in the order of their issue.

        Holders are stages, counted through all pipelines.
        """
        workload = self._costs.workload
        ranges = (LayerRange(start, stop) for own in cut_points for start, stop in pairwise((0, *own)))
        placement = Placement(len(workload.layers), {slot: (layers,) for slot, layers in enumerate(ranges)})
        return [
            (segment.holders, num_bytes)
            for segment in gradient_rounds(placement, workload.tied_layers).order
            if (num_bytes := segment_bytes(segment, workload))
        ]


@dataclass(frozen=True)
class Candidate:
    """Pipelines on workers; a plan is made only if they are chosen.

    Attributes:
        name: origin, see `FoundPlan`.
        step_s: seconds until all operations have ended and all gradients are reduced.
        current: layers that the live workers hold now.
    """

    name: str
    pipelines: PlacedPipelines
    step_s: float
    costs: CostModel
    current: Placement | None

    @cached_property
    def placement(self) -> Placement:
        """The layers of each worker."""
        held = {
            hop.worker: (hop.layers,) for timed, own in self.pipelines for hop in pipeline_hops(own, timed.cut_points)
        }
        return Placement(len(self.costs.workload.layers), held)

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes of their layers that workers lack."""
        return moved_bytes(self.current, self.placement, self.costs.workload.layers)

    @cached_property
    def host_single_points_of_failure(self) -> int:
        """Hosts whose workers are the only ones to hold some layer."""
        return len(self.placement.single_points_of_failure(self.costs.cluster.hosts))

    @property
    def survives_hosts(self) -> bool:
        """Whether every layer keeps a holder after the loss of any one host."""
        # More pipelines than a host has workers are never all on one host.
        return len(self.pipelines) > self.costs.cluster.host_sizes[0] or not self.host_single_points_of_failure

    def found_on(self, costs: CostModel) -> FoundPlan:
        """Return the plan with its predictions for `costs`, whose workers may be faster than those of `self.costs`."""
        in_flight_limits: dict[int, InFlightLimit] = {}
        recompute: dict[int, RecomputedLayers] = {}
        fused: set[int] = set()
        for timed, workers in self.pipelines:
            in_flight_limits.update(zip(workers, limits_of_array(timed.schedule.in_flight_limits), strict=True))
            recompute.update((worker, own) for worker, own in zip(workers, timed.recomputed, strict=True) if own)
            if not timed.scheduler.split_backward:
                fused.update(workers)
        different = list(dict.fromkeys(timed for timed, _ in self.pipelines))
        split = any(timed.scheduler.split_backward for timed in different)
        layouts = [PipelineLayout(timed.cut_points, own, timed.spec.micro_batches) for timed, own in self.pipelines]
        fused_workers = frozenset(fused) if split else frozenset()
        plan = pipelines_plan(layouts, split_backward=split, recompute=recompute, fused_workers=fused_workers)
        if costs.cluster != self.costs.cluster:
            return predicted(self.name, plan, costs, self.current, in_flight_limits)[0]
        return FoundPlan(
            name=self.name,
            plan=plan,
            in_flight_limits=FrozenMap(in_flight_limits),
            step_s=self.step_s,
            program_s=max(timed.program_s for timed in different),
            peak_bytes=max(timed.scheduler.peak_bytes(timed) for timed in different),
            moved_bytes=self.moved_bytes,
            host_single_points_of_failure=self.host_single_points_of_failure,
            schedules=tuple(timed.schedule for timed in different),
        )


def figures(found: Candidate | FoundPlan) -> tuple[float, ...]:
    """Return the figures for choosing plans, the most important first."""
    return found.step_s, found.moved_bytes, found.host_single_points_of_failure


def evaluated(
    others: Mapping[str, Plan],
    costs: CostModel,
    current: Placement | None,
    given: Mapping[int, InFlightLimit] | None,
) -> tuple[list[FoundPlan], dict[str, int]]:
    """Return plans made elsewhere, and the missing bytes of plans that do not fit.

    The `given` limits apply; by default memory alone limits a plan, or `default_limits` where memory does not suffice.
    """
    found: list[FoundPlan] = []
    too_large: dict[str, int] = {}
    for name, plan in others.items():
        given_here = None if given is None else {own: given[own] for own in plan.workers if own in given}
        for in_flight_limits in ({}, default_limits(plan)) if given_here is None else (given_here,):
            other, missing = predicted(name, plan, costs, current, in_flight_limits)
            if not missing:
                too_large.pop(name, None)
                found.append(other)
                break
            too_large[name] = max(missing.values())
    return found, too_large


def predicted(
    name: str,
    plan: Plan,
    costs: CostModel,
    current: Placement | None,
    in_flight_limits: Mapping[int, InFlightLimit],
    *,
    effort: float = PROGRAM_EFFORT,
) -> tuple[FoundPlan, Mapping[int, int]]:
    """Return the plan with its predictions, and the bytes that workers lack for it, by worker."""
    parts = best_parts(plan, costs, in_flight_limits=in_flight_limits, effort=effort)
    estimate = estimate_parts(plan, parts, costs)
    found = FoundPlan(
        name=name,
        plan=plan,
        in_flight_limits=FrozenMap(in_flight_limits),
        step_s=estimate.step_s,
        program_s=estimate.program_s,
        peak_bytes=max(estimate.peak_bytes.values()),
        moved_bytes=moved_bytes(current, plan.placement, costs.workload.layers),
        host_single_points_of_failure=len(plan.placement.single_points_of_failure(costs.cluster.hosts)),
        schedules=tuple(part.schedule for part in parts if isinstance(part.schedule, PipelineSchedule)),
    )
    return found, estimate.over_capacity(costs)


# Hosts that are tried as the first of an order.
_ORDERS: Final = 4
# Up to this many assignments of stages to hosts, all are tried.
_FEW_ASSIGNMENTS: Final = 300

_Workers: TypeAlias = list[tuple[int, ...]]
"""The workers of each pipeline."""


def worker_choices(
    shapes: Sequence[Shape],
    cuts: Sequence[Sequence[int]],
    pool: WorkerPool,
    cluster: Cluster,
    *,
    with_sync: bool,
    usual: bool = False,
) -> list[_Workers]:
    """Return several choices of workers for pipelines, given by their shapes and cut points.

    All choices if links matter and there are few. Otherwise, or if `usual`, neighbours share a host; and where
    gradients are reduced (`with_sync`) there are also choices in which holders of the same layers do.
    """
    every = [] if usual or not with_sync or links_are_equal(cluster) else _every_choice(shapes, pool, cluster)
    if every:
        return every
    found = [_by_pipeline(shapes, pool, cluster)]
    if len(shapes) > 1 and with_sync:
        most = _ORDERS if len(shapes) <= cluster.host_sizes[0] else 1
        found += _by_stage(shapes, cuts, _orders_of_hosts(pool, cluster, most=most))
    return [workers for number, workers in enumerate(found) if workers not in found[:number]]


def assigned_workers(
    pipelines: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    current: Placement,
    cluster: Cluster,
    layers: Sequence[LayerCost],
    *,
    keep_hosts: bool,
) -> dict[int, int]:
    """Return for each worker of pipelines, given as (cut points, workers), the equal one that holds most of its stage.

    With `keep_hosts` a stage stays on its host, so that links, and with them times, stay as they are.
    """
    classes = {
        worker.id: (worker.speed, worker.memory_bytes, worker.host if keep_hosts else None)
        for worker in cluster.workers
    }
    places = {
        hop.worker: Holding((hop.layers,), classes[hop.worker])
        for cut_points, workers in pipelines
        for hop in pipeline_hops(workers, cut_points)
    }
    return assign_roles(holdings_of(current, classes), places, layers)


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster without its hosts with the fewest workers, and so on; at last only one with the most.

    A worker alone on its host, on a slow link, slows down every ring that it is in, and may better be idle. So may the
    workers whose own links are slow, without which the first one is.
    """
    if 0 < len(cluster.badly_linked) < len(cluster.workers):
        yield cluster.without(cluster.badly_linked)
    sizes = Counter(worker.host for worker in cluster.workers)
    kept = [{host for host in sizes if sizes[host] >= size} for size in sorted(set(sizes.values()))[1:]]
    for hosts in [*kept, {max(sizes, key=sizes.__getitem__)}]:
        yield cluster.without([worker.id for worker in cluster.workers if worker.host not in hosts])


def _by_pipeline(shapes: Sequence[Shape], pool: WorkerPool, cluster: Cluster) -> _Workers:
    """Return workers of the classes of each shape, so that neighbours share a host.

    Deep pipelines choose first: of the hosts with room for all workers of a class that they need, the fullest; if there
    is none, the emptiest, and the next one for the rest. Not proven to cross hosts the fewest times.
    """
    free: list[dict[str, list[int]]] = []
    for members in pool.members:
        by_host: dict[str, list[int]] = defaultdict(list)
        for worker in members:
            by_host[cluster.worker(worker).host].append(worker)
        free.append(by_host)

    def take(by_host: dict[str, list[int]], count: int) -> list[int]:
        # Hosts of many workers come last in a pool, and go first among equals.
        hosts = list(reversed(by_host.values()))
        own = min((host for host in hosts if len(host) >= count), key=len, default=max(hosts, key=len))
        taken = own[:count]
        del own[:count]
        return taken if len(taken) == count else [*taken, *take(by_host, count - len(taken))]

    found: _Workers = [()] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-len(shapes[index]), shapes[index], index)):
        runs = [(kind, len(list(run))) for kind, run in groupby(shapes[index])]
        found[index] = tuple(worker for kind, count in runs for worker in take(free[kind], count))
    return found


def _by_stage(
    shapes: Sequence[Shape], cuts: Sequence[Sequence[int]], orders: Iterable[Sequence[Sequence[int]]]
) -> list[_Workers]:
    """Return, for several orders of the members, workers such that holders of the same layers share a host.

    Stages take workers of their class in the order of the members, in the order of the middles of their layers.
    """
    # Twice the middle.
    slots = sorted(
        (start + stop, index, position)
        for index, cut_points in enumerate(cuts)
        for position, (start, stop) in enumerate(pairwise((0, *cut_points)))
    )
    choices: list[_Workers] = []
    for members in orders:
        left = [iter(own) for own in members]
        found = [[0] * len(shape) for shape in shapes]
        for _, index, position in slots:
            found[index][position] = next(left[shapes[index][position]])
        choices.append(list(map(tuple, found)))
    return choices


def _orders_of_hosts(pool: WorkerPool, cluster: Cluster, *, most: int) -> list[list[list[int]]]:
    """Return the members of the pool, host by host, beginning with up to `most` different hosts; the order goes round.

    Which stages share a host depends on where the hosts with fewer workers are in it. Where all have as many, there is
    one order.
    """
    sizes = Counter(worker.host for worker in cluster.workers)
    hosts = sorted(sizes, key=sizes.__getitem__)
    if len(set(sizes.values())) == 1:
        return [[list(own) for own in pool.members]]
    found: list[list[list[int]]] = []
    for number in range(min(most, len(hosts))):
        first = number * len(hosts) // min(most, len(hosts))
        places = {host: place for place, host in enumerate([*hosts[first:], *hosts[:first]])}
        found.append([sorted(own, key=lambda worker: places[cluster.worker(worker).host]) for own in pool.members])
    return found


def _every_choice(shapes: Sequence[Shape], pool: WorkerPool, cluster: Cluster) -> list[_Workers]:
    """Return every choice of the host of each stage, if all workers are of one class and there are few; else none."""
    sizes = cluster.host_sizes
    choices = math.factorial(sum(sizes)) // math.prod(map(math.factorial, sizes))
    if len(pool.classes) > 1 or choices > _FEW_ASSIGNMENTS:
        return []
    members: dict[str, list[int]] = defaultdict(list)
    for worker, host in cluster.hosts.items():
        members[host].append(worker)
    found: list[_Workers] = []
    for hosts in arrangements({host: len(own) for host, own in members.items()}, sum(map(len, shapes))):
        left = {host: iter(own) for host, own in members.items()}
        workers = iter([next(left[host]) for host in hosts])
        found.append([tuple(islice(workers, len(shape))) for shape in shapes])
    return found
