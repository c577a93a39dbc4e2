"""Salvage of an interrupted step: the rest of the step, from what the surviving workers hold of it.

A micro-batch with a missing contribution takes a partial route: F where an operation that remains needs its output and
no worker can send that again, the input gradient down to the lowest missing layer, and weight gradients only where they
are missing. On its own route a micro-batch uses all that survivors hold of it, so pipelines without a lost worker
continue where they were. A micro-batch whose route has lost a worker takes, of its own route with peers in the lost
places and the routes of other pipelines, the one that leaves the least load on its busiest worker. Peers share the lost
places evenly. Of several ways to complete the step, the fastest program is taken.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Self

from chameleon_ft.cost.memory import workload_memory
from chameleon_ft.cost.step import estimate_rest
from chameleon_ft.errors import ProgramError
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan
from chameleon_ft.plan.rest import GradientKey, PartialHop, PartialRoute, RestOfStep, StepProgress
from chameleon_ft.schedule import CostModel, InFlightLimit, OperationKind, ScheduledRest, check_rest, rest_schedules
from chameleon_ft.search import shared_hops

_Hops = tuple[Hop, ...]
_Scored = tuple[tuple[PartialHop, ...], dict[int, float]]
"""(remaining hops of a micro-batch, worker -> seconds that they take)"""


@dataclass(frozen=True, slots=True)
class Salvage:
    """The rest of an interrupted step, and how much of the step it repeats.

    Attributes:
        rest: what remains.
        repeated_s: seconds of operations that are known to have run before the failure, and run again; the sum over all
            workers.
        work_s: seconds of the work of the whole step, on workers of speed 1; likewise.
    """

    rest: RestOfStep
    repeated_s: float
    work_s: float

    @property
    def repeated_share(self) -> float:
        """Share of the step's work that is done twice."""
        return self.repeated_s / self.work_s if self.work_s else 0.0


def salvage(
    plan: Plan,
    progress: Mapping[int, StepProgress],
    costs: CostModel,
    *,
    tied: Iterable[tuple[int, ...]] = (),
    before: RestOfStep | None = None,
) -> tuple[Salvage, ...]:
    """Work out the rest of a step in two ways; none if a layer with a missing contribution has no live holder.

    In the first, peers take lost hops as wholes; in the second also in parts, which levels their loads. Neither always
    leads to the faster program.

    Args:
        plan: the interrupted plan, lost workers included.
        progress: every surviving worker of the plan -> what it holds of the step.
        costs: The costs on these workers at least.
        tied: the sets of layers that share parameters.
        before: the rest of this step that was interrupted itself, if it was one.
    """
    held = _Held(plan, progress, tied)
    hops_of = {route.micro_batch: route.hops for route in plan.routes if not held.is_complete(route.micro_batch)}
    for route in () if before is None else before.routes:
        if route.micro_batch in hops_of:
            hops_of[route.micro_batch] = tuple(Hop(hop.worker, hop.layers) for hop in route.hops)
    # By identity, because hops are slow to hash, and most routes share theirs.
    hops_by_id = {id(hops): hops for hops in (*(route.hops for route in plan.routes), *hops_of.values())}
    whole_ids = {key for key, hops in hops_by_id.items() if all(hop.worker in progress for hop in hops)}
    broken = [number for number, hops in hops_of.items() if id(hops) not in whole_ids]
    survivors = plan.placement.without([worker for worker in plan.workers if worker not in progress])
    if broken and survivors.unheld_layers:
        return ()
    work = _Work(plan, held, costs)
    whole = {number: work.assign(number, [hops]) for number, hops in hops_of.items() if id(hops) in whole_ids}
    pipelines = list(
        dict.fromkeys(
            hops_by_id[key] for key in dict.fromkeys(id(route.hops) for route in plan.routes) if key in whole_ids
        )
    )
    # First those that have begun: on their own routes, less remains of them.
    broken.sort(key=lambda number: (number not in held.begun, number))
    layers_s = math.fsum(costs.workload.layer_times_s)
    found: list[Salvage] = []
    for own, cut in ((work.copy(), False), (work, True)) if broken else ((work, False),):
        detours = own.detours({number: hops_of[number] for number in broken}, survivors, cut=cut)
        routes = whole | {number: own.assign(number, [detours[number], *pipelines]) for number in broken}
        rest = RestOfStep(
            plan=plan,
            routes=tuple(routes[number] for number in sorted(routes)),
            sources=tuple(sorted(held.sources.items())),
        )
        found.append(Salvage(rest, math.fsum(map(own.repeated_s, rest.routes)), plan.micro_batches * layers_s))
    return tuple(found)


class _Held:
    """Holdings of all survivors together.

    Attributes:
        progress: The progress of every survivor.
        begun: micro-batches of which some survivor has run an operation.
        sources: gradients whose sum is known -> the first worker that holds it.
    """

    def __init__(self, plan: Plan, progress: Mapping[int, StepProgress], tied: Iterable[tuple[int, ...]]) -> None:
        self.progress = progress
        self.sources: dict[GradientKey, int] = {}
        for worker in sorted(progress):
            for key in sorted(progress[worker].totals):
                self.sources.setdefault(key, worker)
        num_layers = plan.placement.num_layers
        unknown = {layer for layer in range(num_layers) if (layer,) not in self.sources}
        unknown.update(layer for layers in tied if layers not in self.sources for layer in layers)
        # Sets of layers as bits: those without a known sum, and by micro-batch those with contributions.
        self._unknown = sum(1 << layer for layer in unknown)
        self._contributed: dict[int, int] = defaultdict(int)
        self._counted: set[int] = set()
        # By micro-batch, the layers that it is known to have passed: forward below, and backward from.
        self._forward_to: dict[int, int] = defaultdict(int)
        self._backward_from: dict[int, int] = defaultdict(lambda: num_layers)
        for own in progress.values():
            self._counted |= own.counted
            for number, layers in own.contributed:
                self._contributed[number] |= _bits(layers)
            for number, layers in (*own.saved, *own.deferred, *own.contributed):
                self._forward_to[number] = max(self._forward_to[number], layers.stop)
            for number, layers in (*own.deferred, *own.contributed):
                self._backward_from[number] = min(self._backward_from[number], layers.start)
        self._forward_to.update(dict.fromkeys(self._counted, num_layers))
        self.begun = frozenset(self._forward_to)
        # By micro-batch, the workers that hold more of it than contributions.
        self._touched: dict[int, set[int]] = defaultdict(set)
        for worker, own in progress.items():
            for held in (own.saved, own.deferred, own.activations, own.gradients):
                for number, _ in held:
                    self._touched[number].add(worker)

    def is_counted(self, micro_batch: int) -> bool:
        return micro_batch in self._counted

    def is_complete(self, micro_batch: int) -> bool:
        """Whether every contribution of a micro-batch and its loss are known."""
        return self.is_counted(micro_batch) and not self.missing(micro_batch)

    def missing(self, micro_batch: int) -> int:
        """Return the layers that lack the contribution of a micro-batch, as bits."""
        return self._unknown & ~self._contributed.get(micro_batch, 0)

    def has_touched(self, micro_batch: int, hops: Iterable[Hop]) -> bool:
        """Whether a worker of these hops can use what it holds of a micro-batch."""
        workers = self._touched.get(micro_batch)
        return workers is not None and any(hop.worker in workers for hop in hops)

    def has_run(self, micro_batch: int, kind: OperationKind, hop: PartialHop) -> bool:
        """Whether an operation is known to have run on some worker, live or lost."""
        if kind is OperationKind.FORWARD:
            return hop.layers.stop <= self._forward_to.get(micro_batch, 0)
        if kind is OperationKind.WEIGHT_GRAD and (micro_batch, hop.layers) in self.progress[hop.worker].deferred:
            return False
        return micro_batch in self._backward_from and self._backward_from[micro_batch] <= hop.layers.start

    def split(self, micro_batch: int, hops: Iterable[Hop]) -> tuple[Hop, ...]:
        """Split hops where layers with a contribution and layers without one meet."""
        found: list[Hop] = []
        missing = self.missing(micro_batch)
        for hop in hops:
            if missing & _bits(hop.layers) in (0, _bits(hop.layers)):
                found.append(hop)
                continue
            for _, run in groupby(hop.layers, key=lambda layer: missing >> layer & 1):
                layers = list(run)
                found.append(Hop(hop.worker, LayerRange(layers[0], layers[-1] + 1)))
        return tuple(found)

    def remaining(self, micro_batch: int, hops: Iterable[Hop]) -> tuple[PartialHop, ...]:
        """Return what remains of a micro-batch on these hops, whose workers survive."""
        route = self.split(micro_batch, hops)
        own = [self.progress[hop.worker] for hop in route]
        last = len(route) - 1
        missing = self.missing(micro_batch)
        adds = [missing & _bits(hop.layers) > 0 for hop in route]
        forward, backward = [False] * len(route), [False] * len(route)
        for place, hop in enumerate(route):
            is_asked = place > 0 and backward[place - 1] and (micro_batch, hop.layers.start) not in own[place].gradients
            backward[place] = is_asked or (adds[place] and (micro_batch, hop.layers) not in own[place].deferred)
        for place, hop in reversed([*enumerate(route)]):
            is_asked = (
                not self.is_counted(micro_batch)
                if place == last
                else forward[place + 1] and (micro_batch, hop.layers.stop - 1) not in own[place].activations
            )
            forward[place] = is_asked or (backward[place] and (micro_batch, hop.layers) not in own[place].saved)
        return tuple(
            PartialHop(
                worker=hop.worker,
                layers=hop.layers,
                forward=forward[place],
                backward=backward[place],
                weight_grad=adds[place],
                sends_activation=place < last and forward[place + 1] and not forward[place],
                sends_gradient=place > 0 and backward[place - 1] and not backward[place],
            )
            for place, hop in enumerate(route)
        )


def _bits(layers: LayerRange) -> int:
    return (1 << layers.stop) - (1 << layers.start)


class _Work:
    """Assigns routes to micro-batches, and sums up the seconds of work of each worker."""

    def __init__(self, plan: Plan, held: _Held, costs: CostModel) -> None:
        self._plan = plan
        self._held = held
        self._load_s: dict[int, float] = defaultdict(float)
        self._compute_s = cache(partial(_compute_s, plan, costs))
        self._hop_s = cache(self._new_hop_s)
        self._remaining_s: dict[tuple[object, ...], float] = {}
        # By identity of the hops, which are slow to hash; so equal ones have to be identical, and are kept.
        self._anew: dict[tuple[int, int, bool], _Scored] = {}
        self._detours: dict[_Hops, _Hops] = {}

    def copy(self) -> Self:
        """Return one with the same work so far."""
        found = copy(self)
        found._load_s = self._load_s.copy()
        return found

    def assign(self, micro_batch: int, options: Sequence[_Hops]) -> PartialRoute:
        """Choose the route of a micro-batch."""
        scored = [self._scored(micro_batch, hops) for hops in options]
        if len(scored) > 1:

            def work_s(each: tuple[object, Mapping[int, float]]) -> tuple[float, float]:
                """Return the seconds of the busiest worker, and those of all workers together."""
                busiest_s = max(self._load_s[worker] + own_s for worker, own_s in each[1].items())
                return busiest_s, sum(each[1].values())

            scored.sort(key=work_s)
        hops, seconds = scored[0]
        for worker, own_s in seconds.items():
            self._load_s[worker] += own_s
        return PartialRoute(micro_batch=micro_batch, hops=hops, is_counted=self._held.is_counted(micro_batch))

    def detours(self, broken: Mapping[int, _Hops], survivors: Placement, *, cut: bool) -> dict[int, _Hops]:
        """Return the routes of micro-batches, by number, with hops of peers in the place of those on lost workers."""
        lost: dict[LayerRange, list[int]] = defaultdict(list)
        for number, hops in broken.items():
            for hop in hops:
                if hop.worker not in self._held.progress:
                    lost[hop.layers].append(number)
        load_s = self._load_s.copy()
        peers: dict[tuple[int, LayerRange], list[Hop]] = defaultdict(list)
        for layers, numbers in sorted(lost.items()):
            for part, holders in _parts(layers, survivors, cut=cut):
                for number, hop in shared_hops(numbers, part, holders, load_s, self._hop_s, cut=cut):
                    peers[number, layers].append(hop)
        found = {
            number: tuple(
                new
                for hop in hops
                for new in sorted(peers.get((number, hop.layers), [hop]), key=lambda each: each.layers)
            )
            for number, hops in broken.items()
        }
        return {number: self._detours.setdefault(hops, hops) for number, hops in found.items()}

    def _new_hop_s(self, worker: int, start: int, stop: int) -> float:
        halves = (OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD)
        kinds = OperationKind.FORWARD, *(halves if self._plan.splits(worker) else (OperationKind.BACKWARD,))
        return math.fsum(self._compute_s(worker, kind, LayerRange(start, stop)) for kind in kinds)

    def repeated_s(self, route: PartialRoute) -> float:
        """Return the seconds of operations of a partial route that are known to have run before."""
        if route.micro_batch not in self._held.begun:
            return 0.0
        repeats = partial(self._held.has_run, route.micro_batch)
        return math.fsum(
            self._compute_s(hop.worker, kind, hop.layers)
            for hop in route.hops
            for kind in kinds_of(hop, self._plan)
            if repeats(kind, hop)
        )

    def _scored(self, micro_batch: int, hops: _Hops) -> _Scored:
        """Return what remains of a micro-batch on these hops, and the seconds of each worker."""
        if self._held.has_touched(micro_batch, hops):
            return self._measured(micro_batch, hops)
        # Then it is no different from others of which the same is missing.
        key = id(hops), self._held.missing(micro_batch), self._held.is_counted(micro_batch)
        if key not in self._anew:
            self._anew[key] = self._measured(micro_batch, hops)
        return self._anew[key]

    def _measured(self, micro_batch: int, hops: _Hops) -> _Scored:
        remaining = self._held.remaining(micro_batch, hops)
        seconds: dict[int, float] = defaultdict(float)
        for hop in remaining:
            if hop.forward or hop.backward or hop.weight_grad:
                key = hop.worker, hop.layers.start, hop.layers.stop, hop.forward, hop.backward, hop.weight_grad
                if key not in self._remaining_s:
                    kinds = kinds_of(hop, self._plan)
                    self._remaining_s[key] = math.fsum(self._compute_s(hop.worker, kind, hop.layers) for kind in kinds)
                seconds[hop.worker] += self._remaining_s[key]
        return remaining, seconds


def _parts(layers: LayerRange, survivors: Placement, *, cut: bool) -> Iterator[tuple[LayerRange, tuple[int, ...]]]:
    """Yield the ranges into which a lost hop is cut, each with its holders.

    With `cut`, a range ends where that of any holder does; otherwise where that of the last one does, so a hop that
    some worker holds as a whole is not cut.
    """
    start = layers.start
    while start < layers.stop:
        stops = {
            worker: min(layers.stop, own.stop)
            for worker in survivors.holders(start)
            for own in survivors.ranges_of(worker)
            if start in own
        }
        stop = min(stops.values()) if cut else max(stops.values())
        yield LayerRange(start, stop), tuple(worker for worker, own_stop in stops.items() if own_stop >= stop)
        start = stop


def _compute_s(plan: Plan, costs: CostModel, worker: int, kind: OperationKind, layers: LayerRange) -> float:
    return costs.compute_s(worker, kind, layers, recompute=plan.recompute.get(worker))


def kinds_of(hop: PartialHop, plan: Plan) -> tuple[OperationKind, ...]:
    """Return the operations of a hop that remain, in their order."""
    if hop.backward and hop.weight_grad and not plan.splits(hop.worker):
        backward: tuple[OperationKind, ...] = (OperationKind.BACKWARD,)
    else:
        kinds = ((hop.backward, OperationKind.INPUT_GRAD), (hop.weight_grad, OperationKind.WEIGHT_GRAD))
        backward = tuple(kind for remains, kind in kinds if remains)
    return (OperationKind.FORWARD, *backward) if hop.forward else backward


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvagedStep:
    """The program of the rest of an interrupted step.

    Attributes:
        rest: what remains.
        scheduled: in which order.
        rest_s: predicted seconds until all gradients are reduced.
        repeated_share: share of the step's work that is done twice.
    """

    rest: RestOfStep
    scheduled: ScheduledRest
    rest_s: float
    repeated_share: float


def complete_step(
    plan: Plan,
    progress: Mapping[int, StepProgress],
    costs: CostModel,
    in_flight_limits: Mapping[int, InFlightLimit],
    *,
    before: RestOfStep | None = None,
) -> SalvagedStep | None:
    """Return the fastest program that completes a step, which is checked; see `salvage` for the arguments.

    None if there is no way to complete it, or none of which an order of the operations was found in which messages
    arrive as they are taken.

    Args:
        in_flight_limits: limits of the plan; a worker whose memory is known may exceed its limit as far as that allows.
    """
    limits = limits_by_memory(plan, costs, in_flight_limits)
    steps = [
        _estimated(found, rest_schedules(found.rest, costs, in_flight_limits=limits), costs)
        for found in salvage(plan, progress, costs, tied=costs.workload.tied_layers, before=before)
    ]
    # Most are never needed: the check takes as long as several schedules, and the fastest one hardly ever fails it.
    for step in heapq.merge(*steps, key=lambda step: step.rest_s):
        with contextlib.suppress(ProgramError):
            check_rest(step.scheduled.program, step.scheduled.resends, step.rest)
            return step
    return None


def _estimated(found: Salvage, schedules: Iterable[ScheduledRest], costs: CostModel) -> Iterator[SalvagedStep]:
    for scheduled in schedules:
        rest_s = estimate_rest(found.rest, scheduled, costs).step_s
        yield SalvagedStep(rest=found.rest, scheduled=scheduled, rest_s=rest_s, repeated_share=found.repeated_share)


def limits_by_memory(plan: Plan, costs: CostModel, limits: Mapping[int, InFlightLimit]) -> Mapping[int, InFlightLimit]:
    """Return how many micro-batches each worker can keep; those in `limits` fit in any case.

    A micro-batch is counted with all layers of the worker, without recomputation; one is left out for the messages and
    the operation that runs.
    """
    layers, found = costs.workload.layers, dict(limits)
    memory = workload_memory(costs.workload)

    @cache
    def bytes_of(ranges: tuple[LayerRange, ...]) -> tuple[int, int]:
        """Return the bytes that are always there, and those of a micro-batch."""
        own = [layers[layer] for each in ranges for layer in each]
        hop_bytes = sum(max(each.activation_bytes, each.weight_grad_bytes) + each.output_bytes for each in own)
        working = max(max(each.working_bytes, each.working_in_halves) for each in own)
        return memory.state_of(ranges, plan.placement).total_bytes + working, hop_bytes

    for worker in costs.cluster.workers:
        ranges = plan.placement.ranges_of(worker.id) if worker.id in found else ()
        if worker.memory_bytes is None or not ranges:
            continue
        fixed_bytes, hop_bytes = bytes_of(ranges)
        fits = (worker.memory_bytes - fixed_bytes) // max(1, hop_bytes) - 1
        limit = found[worker.id]
        if fits > limit.in_flight:
            deferred = None if limit.deferred is None else max(limit.deferred, fits)
            found[worker.id] = InFlightLimit(fits, max(limit.kept, fits), deferred)
    return found
