"""A plan under a cost model as flat arrays of numbers, which is what kernels read.

Every hop of every route gets a number, its *slot*: routes in order, hops of a route one after the other, so that the
slots before and after on a route are `slot - 1` and `slot + 1`. Workers are numbered 0, 1, ... in ascending order of
their ids. A *channel* carries what one worker makes for one worker in one direction, in order; it too has a number.
Operations have *codes*: of n slots, slot for F, slot + n for B or I, and slot + 2n for W.

`CostModel` has the seconds of operations and messages, `replay` predicts when each operation of a program starts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple, Self

import numpy as np

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError, ProgramError
from chameleon_ft.plan import Hop, LayerRange, Plan, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule.program import Operation, OperationKind, Program
from chameleon_ft.schedule.records import (
    CHANNEL,
    OPERATION,
    SLOT,
    Component,
    HopPath,
    Integers,
    Records,
    components,
    records_of_routes,
)
from chameleon_ft.workload import Workload


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost model: a workload's layer times on a cluster's workers and links."""

    workload: Workload
    cluster: Cluster

    def with_micro_batches(self, count: int) -> Self:
        """Return the costs of a step of another number of micro-batches."""
        return replace(self, workload=replace(self.workload, micro_batches=count))

    def operation_s(self, worker: int, operation: Operation) -> float:
        """Return the seconds of `operation` on `worker`: `compute_s` of its kind and layers."""
        return self.compute_s(worker, operation.kind, operation.layers, recompute=operation.recompute)

    def compute_s(
        self, worker: int, kind: OperationKind, layers: LayerRange, *, recompute: RecomputedLayers | None = None
    ) -> float:
        """Return the seconds of an operation: the fixed overhead, and the layers' times over the worker's speed.

        The first hop of a route has no input gradient to compute: with split backward its I does nothing, and its W is
        the whole backward. The operation that begins the backward (B, I, or the W of a first hop) recomputes the layers
        in `recompute`, except the model's first and last layer.

        Raises PlanError when the workload has too few layers, ConfigError when the cluster lacks the worker.
        """
        if layers.stop > len(self.workload.layers):
            raise PlanError(f"layers {layers} go past the {len(self.workload.layers)} layers of the workload")
        costs = self.workload.layers[layers.start : layers.stop]
        times_s: list[float] = []
        if kind is OperationKind.FORWARD:
            times_s += [cost.forward_s for cost in costs]
        elif kind is OperationKind.WEIGHT_GRAD and layers.start:
            times_s += [cost.weight_grad_s for cost in costs]
        elif kind is OperationKind.INPUT_GRAD and layers.start:
            times_s += [cost.input_grad_s for cost in costs] + self._recompute_s(layers, recompute)
        elif kind is not OperationKind.INPUT_GRAD:
            for cost in costs:
                fused_s = cost.fused_backward_s
                times_s += (cost.input_grad_s, cost.weight_grad_s) if fused_s is None else (fused_s,)
            times_s += self._recompute_s(layers, recompute)
        # fsum rounds once, so that stages of equal layers cost exactly the same wherever they are.
        return self.workload.operation_overhead_s + math.fsum(times_s) / self.cluster.worker(worker).speed

    def _recompute_s(self, layers: LayerRange, recompute: RecomputedLayers | None) -> list[float]:
        """Seconds of recomputing each of these layers."""
        costs = self.workload.layers
        part = None if recompute is None else recompute.intersection(layers)
        return [
            costs[layer].forward_s if layer in part.full else costs[layer].selective_s
            for layer in part or ()
            if part is not None and self.workload.is_recomputed(layer)
        ]

    def pace(self, worker: int) -> float:
        """Return a number that is equal for workers on which equal operations take equally long."""
        return self.cluster.worker(worker).speed

    def message_s(self, src: int, dst: int, num_bytes: float) -> float:
        """Return the seconds from the start of a send until it has arrived; zero between a worker and itself."""
        return 0.0 if src == dst else self.cluster.link(src, dst).message_s(num_bytes)

    def all_reduce_s(self, layers: LayerRange, holders: Collection[int], num_bytes: int) -> float:
        """Return the seconds in which `holders` sum the gradients of a segment, which begins with these layers."""
        return self.cluster.ring_all_reduce_s(holders, num_bytes)

    def message_bytes(self, layer: int) -> int:
        """Return the bytes of the activation after `layer`, which are those of its gradient."""
        return self.workload.layers[layer].output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Seconds of each stage of a pipeline, first to last, for one micro-batch.

    Attributes:
        forward_s: seconds of F at each stage (f).
        backward_s: seconds of B, or with split backward of I (b).
        weight_grad_s: seconds of W (w); zeros with fused backward.
        message_s: seconds between a stage and the next, in one direction (c); one fewer than there are stages.

    Raises:
        PlanError: no stages, or lists whose lengths do not fit.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    message_s: tuple[float, ...]

    def __post_init__(self) -> None:
        depth, *others = map(len, (self.forward_s, self.backward_s, self.weight_grad_s, self.message_s))
        if depth < 1 or others != [depth, depth, depth - 1]:
            raise PlanError(
                "a pipeline of p stages needs p forward, backward and weight-gradient times and p - 1 message times; "
                f"got {depth}, {others[0]}, {others[1]} and {others[2]}"
            )

    @property
    def depth(self) -> int:
        """Stages (p)."""
        return len(self.forward_s)


def pipeline_times(
    hops: Sequence[Hop],
    costs: CostModel,
    *,
    split_backward: bool = False,
    recompute: Mapping[int, RecomputedLayers] = FrozenMap({}),
) -> PipelineTimes:
    """Return the times of a route's hops, each on its worker; `recompute` is that of the plan.

    Raises:
        PlanError: no hops, or unknown layers.
        ConfigError: the cluster lacks a worker.
    """

    def times_s(kind: OperationKind) -> tuple[float, ...]:
        return tuple(costs.compute_s(hop.worker, kind, hop.layers, recompute=recompute.get(hop.worker)) for hop in hops)

    return PipelineTimes(
        forward_s=times_s(OperationKind.FORWARD),
        backward_s=times_s(OperationKind.INPUT_GRAD if split_backward else OperationKind.BACKWARD),
        weight_grad_s=times_s(OperationKind.WEIGHT_GRAD) if split_backward else (0.0,) * len(hops),
        message_s=tuple(
            costs.message_s(hop.worker, after.worker, costs.message_bytes(hop.layers.stop - 1))
            for hop, after in pairwise(hops)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """The slots of the routes of a plan, and what follows from them.

    Attributes:
        workers: ids of the workers by index.
        channels: by number, `CHANNEL`.
        split_backward: there are codes of W.
        slots: by number, `SLOT`.
        operations: by code, `OPERATION`.
        first: for each worker the place of its first code if the orders of all workers are written one after the other,
            and in the end the number of codes; int64 [workers + 1].
        by_priority: the first slot of each route, highest priority first: by the place of its micro-batch in its own
            pipeline, then by how few routes share its workers, because detours are otherwise late for a peer.
    """

    workers: tuple[int, ...]
    channels: Records
    split_backward: bool
    slots: Records
    operations: Records
    first: Integers
    by_priority: Integers

    def lower_bound_s(self) -> float:
        """Return the seconds that no order of the operations can beat.

        For each worker: the shortest time in which a micro-batch reaches it, all its work, and the shortest time after
        it. A W may come last of all, but the last F or I is followed by the Is of the workers before, and their W.
        """
        slots, num_workers = self.slots, len(self.workers)
        before_s, after_s = np.full((2, num_workers), np.inf)
        work_s, weight_s = np.zeros((2, num_workers))
        # All routes at once: the slot that each has reached, seconds until there, and seconds back from there.
        slot = np.flatnonzero(slots["up"] < 0)
        down_s, back_s = np.zeros(len(slot)), slots["weight_s"][slot]
        while len(slot):
            own = slots[slot]
            worker = own["worker"]
            np.minimum.at(before_s, worker, down_s)
            np.minimum.at(after_s, worker, back_s + own["up_s"])
            np.add.at(work_s, worker, own["forward_s"] + own["backward_s"])
            np.add.at(weight_s, worker, own["weight_s"])
            down_s = down_s + own["forward_s"] + own["down_s"]
            back_s = back_s + own["backward_s"] + own["up_s"]
            continues = ~own["last"]
            slot, down_s, back_s = slot[continues] + 1, down_s[continues], back_s[continues]
        is_used = before_s < np.inf
        bounds_s = before_s + work_s + np.maximum(weight_s, after_s)
        return float(bounds_s[is_used].max(initial=0.0))


def pipeline_network(times: PipelineTimes, micro_batches: int, *, split_backward: bool) -> Network:
    """Return the network of a pipeline with a worker for each stage; its slots have no layers."""
    depth = times.depth
    stage = np.arange(depth)
    route = _route_slots(times, stage, split_backward, downs=2 * stage, ups=2 * stage - 1)
    slots = np.tile(route, micro_batches)
    return Network(
        workers=tuple(range(depth)),
        channels=_pipeline_channels(depth),
        split_backward=split_backward,
        slots=slots,
        operations=operations_of_slots(slots, split_backward=split_backward),
        first=np.arange(depth + 1) * ((3 if split_backward else 2) * micro_batches),
        by_priority=np.arange(micro_batches) * depth,
    )


@lru_cache(maxsize=64)
def _pipeline_channels(depth: int) -> Records:
    """Channel 2s carries activations from stage s to the next, or turns at the last; 2s - 1 carries gradients back."""
    stage = np.arange(depth)
    channels = np.zeros(2 * depth - 1, CHANNEL)
    channels["sender"] = np.arange(1, 2 * depth) // 2
    channels["receiver"][::2] = np.minimum(stage + 1, depth - 1)
    channels["receiver"][1::2] = stage[:-1]
    channels["gradient"][1::2] = channels["gradient"][-1] = True
    return channels


class NetworkBuilder:
    """Builds networks of routes between given workers; caches the slots of every path."""

    def __init__(
        self,
        costs: CostModel,
        *,
        split_backward: bool,
        recompute: Mapping[int, RecomputedLayers] = FrozenMap({}),
        workers: tuple[int, ...] = (),
    ) -> None:
        self.split_backward = split_backward
        self.workers = workers
        self._costs = costs
        self._recompute = recompute
        self._index = {worker: index for index, worker in enumerate(workers)}
        self._channels: dict[tuple[int, int, bool], int] = {}
        self.slots = cache(self._slots)

    def network(self, paths: Sequence[HopPath], path_of: Sequence[int]) -> Network:
        """Return the network of routes over these paths, of which `path_of` has the index for each route."""
        slots, begins = records_of_routes([self.slots(hops) for hops in paths], path_of)
        hops = np.bincount(slots["worker"], minlength=len(self.workers))
        return Network(
            workers=self.workers,
            channels=np.array(list(self._channels), CHANNEL),
            split_backward=self.split_backward,
            slots=slots,
            operations=operations_of_slots(slots, split_backward=self.split_backward),
            first=np.concatenate(([0], np.cumsum(hops))) * (3 if self.split_backward else 2),
            by_priority=begins[_route_order(slots, begins, paths, np.array(path_of), len(self.workers))],
        )

    def times(self, hops: Sequence[Hop]) -> PipelineTimes:
        """Return the seconds of the operations and messages of a route."""
        return pipeline_times(hops, self._costs, split_backward=self.split_backward, recompute=self._recompute)

    def _slots(self, hops: HopPath) -> Records:
        """The slots of one route; `SLOT` [hops]."""
        workers = [self._index[hop.worker] for hop in hops]
        downs = [self._channel(*pair, gradient=False) for pair in pairwise(workers)]
        ups = [self._channel(after, before, gradient=True) for before, after in pairwise(workers)]
        turn = self._channel(workers[-1], workers[-1], gradient=True)
        slots = _route_slots(self.times(hops), workers, self.split_backward, downs=[*downs, turn], ups=[-1, *ups])
        slots["start"] = [hop.layers.start for hop in hops]
        slots["stop"] = [hop.layers.stop for hop in hops]
        return slots

    def _channel(self, sender: int, receiver: int, *, gradient: bool) -> int:
        return self._channels.setdefault((sender, receiver, gradient), len(self._channels))


def builder_of(plan: Plan, costs: CostModel) -> NetworkBuilder:
    """Return a builder for networks of routes between the workers of a plan.

    Raises PlanError when the workload has another number of layers than the plan.
    """
    _check_layers(plan, costs)
    return NetworkBuilder(costs, split_backward=plan.split_backward, recompute=plan.recompute, workers=plan.workers)


def component_builders(plan: Plan, costs: CostModel) -> Iterator[tuple[Component, NetworkBuilder]]:
    """Yield the components of a plan, each with a builder that numbers workers as the component does.

    Raises PlanError when the workload has another number of layers than the plan.
    """
    _check_layers(plan, costs)
    for component in components(plan.routes):
        workers = component.workers
        split = plan.splits(workers[0])
        yield component, NetworkBuilder(costs, split_backward=split, recompute=plan.recompute, workers=workers)


def _check_layers(plan: Plan, costs: CostModel) -> None:
    if plan.placement.num_layers != len(costs.workload.layers):
        raise PlanError(
            f"the plan places {plan.placement.num_layers} layers, but the workload has "
            f"{len(costs.workload.layers)}; use the workload of the model that is planned"
        )


def _route_order(
    slots: Records, begins: Integers, paths: Sequence[HopPath], path_of: Integers, num_workers: int
) -> Integers:
    """The numbers of the routes in the order of `Network.by_priority`."""
    workers = [tuple(hop.worker for hop in hops) for hops in paths]
    routes_over = Counter[tuple[int, ...]]()
    for path, count in enumerate(np.bincount(path_of, minlength=len(paths)).tolist()):
        routes_over[workers[path]] += count
    company = np.array([routes_over[each] for each in workers])[path_of]
    found: Integers = np.lexsort((company, places_at_home(slots["worker"], begins, num_workers)))
    return found


def places_at_home(worker: Integers, begins: Integers, num_workers: int) -> Integers:
    """Return the place of each route among those of its own pipeline.

    A worker that takes over hops of other pipelines has more hops than its own pipeline's other workers. So the least
    loaded worker on a route belongs to its own pipeline.

    Args:
        worker: index of the worker of each slot; int64 [slots].
        begins: the first slot of each route; int64 [routes].
        num_workers: number of workers.
    """
    count = len(worker)
    load = np.bincount(worker, minlength=num_workers)
    by_worker = np.argsort(worker, kind="stable")
    place = np.empty(count, np.int64)
    place[by_worker] = np.arange(count) - np.repeat(np.cumsum(load) - load, load)
    # The least load, and of equals the first slot.
    home = np.minimum.reduceat(load[worker] * count + np.arange(count), begins) % count
    found: Integers = place[home]
    return found


def _route_slots(
    times: PipelineTimes,
    workers: Sequence[int] | Integers,
    split_backward: bool,
    *,
    downs: Sequence[int] | Integers,
    ups: Sequence[int] | Integers,
) -> Records:
    """The slots of one route on these workers, without layers; `downs` and `ups` are the numbers of channels."""
    # Of zeros, so that the padding between the fields is the same in equal slots.
    slots = np.zeros(times.depth, SLOT)
    slots["worker"], slots["down"], slots["up"] = workers, downs, ups
    slots["forward_s"], slots["backward_s"], slots["weight_s"] = times.forward_s, times.backward_s, times.weight_grad_s
    slots["down_s"] = (*times.message_s, 0.0)
    slots["up_s"] = (0.0, *times.message_s)
    slots["last"][-1] = True
    slots["runs_forward"] = slots["runs_backward"] = True
    slots["runs_weight_grad"] = split_backward
    return slots


def operations_of_slots(slots: Records, *, split_backward: bool) -> Records:
    """Return the predecessor and the times of each operation of a whole step by its code; `OPERATION` [operations]."""
    count = len(slots)
    found = np.zeros(count * (3 if split_backward else 2), OPERATION)
    forwards, backwards, weight_grads = found[:count], found[count : 2 * count], found[2 * count :]
    number = np.arange(count)
    forwards["needs"] = np.where(slots["up"] >= 0, number - 1, -1)
    # No message goes into the first slot of a route or out of the last, so that those beside them may be read as well.
    forwards["delay_s"][1:] = slots["down_s"][:-1]
    forwards["duration_s"] = slots["forward_s"]
    backwards["needs"] = np.where(slots["last"], number, count + number + 1)
    backwards["delay_s"][:-1] = slots["up_s"][1:]
    backwards["duration_s"] = slots["backward_s"]
    if split_backward:
        weight_grads["needs"] = count + number
        weight_grads["duration_s"] = slots["weight_s"]
    return found


class TimedOperation(NamedTuple):
    """An operation on a worker with its start and end, in seconds since the start of the step."""

    worker: int
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The operations of a step with their times, worker by worker, each worker's in the order it runs them."""

    operations: tuple[TimedOperation, ...]

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of its last operation; zero when there are none."""
        return max((timed.end_s for timed in self.operations), default=0.0)

    def of(self, worker: int) -> tuple[TimedOperation, ...]:
        """Return the operations of one worker, in its order."""
        return tuple(timed for timed in self.operations if timed.worker == worker)

    def busy_s(self, worker: int) -> float:
        """Return the seconds that one worker computes."""
        return math.fsum(timed.end_s - timed.start_s for timed in self.of(worker))


def replay(program: Program, costs: CostModel) -> Timeline:
    """Replay `program` under `costs`: an operation starts when its worker is free and its input is there.

    The result is the longest path over the operations, exact for the cost model: messages take time but delay neither
    end. `check_program` checks whether sends and receives match in order.

    Raises:
        ProgramError: operations wait for each other forever, or for one that no worker runs.
    """
    by_worker = program.operations
    operations = [*chain.from_iterable(by_worker.values())]
    workers = [worker for worker, own in by_worker.items() for _ in own]
    if not operations:
        return Timeline(())
    # Imported here: importing a kernel loads numba, and most users of this module run none.
    from chameleon_ft.schedule._kernels.replay import longest_path

    found = longest_path(_needs(workers, operations, costs), np.arange(len(operations)), np.array(program.starts))
    starts_s, ends_s = (times_s.tolist() for times_s in found)
    if min(ends_s) < 0:
        orders = (range(*own) for own in pairwise(program.starts))
        never = (next((number for number in order if ends_s[number] < 0), None) for order in orders)
        stuck = ", ".join(f"worker {workers[number]} at {operations[number]}" for number in never if number is not None)
        raise ProgramError(f"the program never ends: no operation will make what is needed by {stuck}")
    return Timeline(tuple(map(TimedOperation, workers, operations, starts_s, ends_s)))


def _needs(workers: list[int], operations: list[Operation], costs: CostModel) -> Records:
    """`OPERATION` of each operation, of which `workers` has the worker.

    An output is identified by whether it is a gradient, its micro-batch, and its hop. W needs the output of I, because
    what I leaves for it is there at the same time.
    """
    forward, weight_grad = OperationKind.FORWARD, OperationKind.WEIGHT_GRAD
    makers = {
        (operation.kind is not forward, operation.micro_batch, operation.hop): number
        for number, operation in enumerate(operations)
        if operation.kind is not weight_grad
    }
    # Operations and messages have few different times.
    compute_s = cache(costs.compute_s)

    @cache
    def message_s(maker: int, worker: int, layer: int) -> float:
        return costs.message_s(maker, worker, costs.message_bytes(layer))

    needs, delay_s, duration_s = [-1] * len(operations), [0.0] * len(operations), [0.0] * len(operations)
    for number, (worker, operation) in enumerate(zip(workers, operations, strict=True)):
        kind, layers, micro_batch, hop = operation.kind, operation.layers, operation.micro_batch, operation.hop
        duration_s[number] = compute_s(worker, kind, layers, recompute=operation.recompute)
        if kind is forward:
            if operation.first:
                continue
            made_by = (False, micro_batch, hop - 1)
        elif kind is weight_grad:
            made_by = (True, micro_batch, hop)
        else:
            made_by = (False, micro_batch, hop) if operation.last else (True, micro_batch, hop + 1)
        needs[number] = needed = makers.get(made_by, number)
        if workers[needed] != worker:
            delay_s[number] = message_s(workers[needed], worker, (layers.start if kind is forward else layers.stop) - 1)
    found = np.empty(len(operations), OPERATION)
    found["needs"], found["delay_s"], found["duration_s"] = needs, delay_s, duration_s
    return found
