"""Pipelines on real workers: what a step of them takes, and the plan that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.plan import Placement, Plan, Route
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.search._arrange import by_pipeline, by_stage_each, orders_of_hosts
from chameleon_ft.search._bounds import Stops
from chameleon_ft.search._effort import polish_effort
from chameleon_ft.search._kinds import Crew, Shape
from chameleon_ft.search._reductions import reductions
from chameleon_ft.search._rings import reduced_s
from chameleon_ft.search._sync import largest_host
from chameleon_ft.search._timed import TimedPipeline, Timer, hops_of
from chameleon_ft.search.result import FoundPlan
from chameleon_ft.transfer import Holding, assign_roles, holdings_of, moved_bytes

# So many hosts are tried to begin with.
_ORDERS: Final = 4


@dataclass(frozen=True, slots=True)
class PlacedPipeline:
    """A pipeline and the workers that it runs on."""

    timed: TimedPipeline
    workers: tuple[int, ...]


class Places:
    """Ways to place pipelines on the workers of a crew."""

    def __init__(self, crew: Crew, costs: CostModel) -> None:
        self._crew = crew
        self._cluster = costs.cluster
        self._has_gradients = has_gradients(costs)
        self._orders: dict[int, list[list[list[int]]]] = {}

    def ways(self, shapes: Sequence[Shape], cuts: Sequence[Stops]) -> list[list[tuple[int, ...]]]:
        """Workers for each pipeline: so that its neighbours share a host; and where there is something to be reduced,
        also so that holders of the same layers do, in several ways where a host has room for them."""
        ways = [by_pipeline(shapes, self._crew, self._cluster)]
        if len(shapes) > 1 and self._has_gradients:
            most = _ORDERS if len(shapes) <= largest_host(self._cluster) else 1
            if most not in self._orders:
                self._orders[most] = orders_of_hosts(self._crew, self._cluster, most=most)
            ways += by_stage_each(shapes, cuts, self._orders[most])
        return ways


def has_gradients(costs: CostModel) -> bool:
    """Whether there is anything to reduce."""
    return any(layer.gradient_bytes for layer in costs.workload.layers)


def synced_s(pipelines: Sequence[PlacedPipeline], timer: Timer) -> float:
    """Seconds until all operations have ended and all gradients are reduced, as `estimate_sync` has it.

    Workers with equal stages of equal programs do everything at the same time, so a few stand for all.

    Args:
        pipelines: such as come from this timer, and live as long.
        timer: what is known of pipelines.
    """
    key = tuple((id(each.timed), each.workers) for each in pipelines)
    found = timer.synced_s.get(key)
    if found is None:
        found = timer.synced_s[key] = _synced_s(pipelines, timer)
    return found


def _synced_s(pipelines: Sequence[PlacedPipeline], timer: Timer) -> float:
    costs = timer.costs
    program_s = max(each.timed.program_s for each in pipelines)
    tied = costs.workload.tied_layers
    if (len(pipelines) < 2 and not tied) or not has_gradients(costs):
        return program_s
    if not tied:
        programs: dict[int, tuple[TimedPipeline, list[tuple[int, ...]]]] = {}
        for each in pipelines:
            programs.setdefault(id(each.timed), (each.timed, []))[1].append(each.workers)
        return max(program_s, reduced_s(list(programs.values()), timer))
    return max(program_s, _tied_reduced_s(pipelines, timer))


def _tied_reduced_s(pipelines: Sequence[PlacedPipeline], timer: Timer) -> float:
    """The same of the last reduction, where some parameters are tied: their holders may be of any pipelines."""
    costs = timer.costs
    stops = tuple(each.timed.stops for each in pipelines)
    if stops not in timer.reductions:
        timer.reductions[stops] = reductions(stops, costs.workload)
    hosts = costs.cluster.hosts
    host_of = [hosts[worker] for each in pipelines for worker in each.workers]
    free_s = [end_s for each in pipelines for end_s in each.timed.ends_s]
    last_s = 0.0
    for reduction in timer.reductions[stops]:
        start_s = max(free_s[slot] for slot in reduction.slots)
        holders = [host_of[slot] for slot in reduction.slots]
        done_s = start_s + _ring_s(holders, reduction.num_bytes, costs.cluster)
        for slot in reduction.slots:
            free_s[slot] = done_s
        last_s = max(last_s, done_s)
    return last_s


def polished(pipelines: Sequence[PlacedPipeline], timer: Timer, effort: int | None) -> tuple[PlacedPipeline, ...]:
    """The same with the best program for every pipeline that would end last otherwise, in a search of this effort."""
    programs = {id(each.timed): each for each in pipelines}
    best: dict[int, TimedPipeline] = {}
    last_s = 0.0
    for key, each in sorted(programs.items(), key=lambda item: -item[1].timed.program_s):
        if each.timed.program_s <= last_s:
            break
        best[key] = timer.moved(each.timed, each.workers, effort=polish_effort(effort))
        last_s = max(last_s, best[key].program_s)
    better = tuple(PlacedPipeline(best.get(id(each.timed), each.timed), each.workers) for each in pipelines)
    return min((better, tuple(pipelines)), key=lambda each: synced_s(each, timer))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of pipelines with what plans are chosen by; the rest is made of those only that are chosen.

    Attributes:
        name, step_s, moved_bytes, last_hosts: as in `FoundPlan`.
        pipelines: all of it.
        timer: that its pipelines come from.
        placement: which layers its workers hold.
    """

    name: str
    pipelines: tuple[PlacedPipeline, ...]
    timer: Timer
    placement: Placement
    step_s: float
    moved_bytes: int
    last_hosts: int

    def found(self) -> FoundPlan:
        """The plan, with all that is predicted of it."""
        timer = self.timer
        routes: list[Route] = []
        ceiling: dict[int, InFlightLimit] = {}
        limits: dict[int, list[InFlightLimit]] = {}
        recompute: set[int] = set()
        for each in self.pipelines:
            timed = each.timed
            if id(timed) not in limits:
                own = timer.limits(timed.shape, timed.stops, timed.micro_batches, recompute=timed.recompute)
                limits[id(timed)] = list(map(InFlightLimit, *own.tolist()))
            hops = hops_of(each.workers, timed.stops)
            ceiling.update(zip(each.workers, limits[id(timed)], strict=True))
            if timed.recompute:
                recompute.update(each.workers)
            first = len(routes)
            routes += [Route(number, hops) for number in range(first, first + timed.micro_batches)]
        programs = {id(each.timed): each.timed for each in self.pipelines}.values()
        return FoundPlan(
            name=self.name,
            plan=Plan(self.placement, tuple(routes), timer.split_backward, frozenset(recompute)),
            ceiling=FrozenMap(ceiling),
            step_s=self.step_s,
            program_s=max(timed.program_s for timed in programs),
            peak_bytes=max(map(timer.peak_bytes, programs)),
            moved_bytes=self.moved_bytes,
            last_hosts=self.last_hosts,
            schedules=tuple(timed.schedule for timed in programs),
        )


def candidate(name: str, pipelines: Sequence[PlacedPipeline], timer: Timer, current: Placement | None) -> Candidate:
    """The plan of these pipelines, with what plans are chosen by."""
    costs = timer.costs
    held = {hop.worker: (hop.layers,) for each in pipelines for hop in hops_of(each.workers, each.timed.stops)}
    placement = Placement(len(costs.workload.layers), held)
    return Candidate(
        name=name,
        pipelines=tuple(pipelines),
        timer=timer,
        placement=placement,
        step_s=synced_s(pipelines, timer),
        moved_bytes=moved_bytes(current, placement, costs.workload.layers),
        last_hosts=len(placement.indispensable(costs.cluster.hosts)),
    )


def found_plan(name: str, pipelines: Sequence[PlacedPipeline], timer: Timer, current: Placement | None) -> FoundPlan:
    """The same, with all that is predicted of it."""
    return candidate(name, pipelines, timer, current).found()


def in_roles(
    pipelines: Sequence[PlacedPipeline], timer: Timer, current: Placement, *, keep_hosts: bool, effort: int | None
) -> tuple[PlacedPipeline, ...]:
    """The same pipelines with stages on the workers that hold most of them, so that the least has to move.

    With `keep_hosts` a stage stays on its host, so that links, and with them times, stay as they are. Otherwise they
    get the best programs, in a search of this effort.
    """
    cluster = timer.costs.cluster
    kinds = {
        worker.id: (worker.speed, worker.memory_bytes, worker.host if keep_hosts else None)
        for worker in cluster.workers
    }
    places = {
        hop.worker: Holding((hop.layers,), kinds[hop.worker])
        for each in pipelines
        for hop in hops_of(each.workers, each.timed.stops)
    }
    roles = assign_roles(holdings_of(current, kinds), places, timer.costs.workload.layers)
    found: list[PlacedPipeline] = []
    for each in pipelines:
        workers = tuple(roles[worker] for worker in each.workers)
        timed = each.timed if keep_hosts else timer.replayed(each.timed, workers)
        found.append(PlacedPipeline(timed, workers))
    return tuple(found) if keep_hosts else polished(found, timer, effort)


def _ring_s(hosts: Sequence[str], num_bytes: int, cluster: Cluster) -> float:
    different = len(set(hosts))
    links = ([cluster.inter_host] if different > 1 else []) + ([cluster.intra_host] if different < len(hosts) else [])
    return max(link.ring_all_reduce_s(num_bytes, len(hosts)) for link in links)
