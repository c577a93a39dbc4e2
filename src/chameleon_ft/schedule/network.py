"""A plan under a cost model as flat arrays of numbers, which is what kernels read.

Every hop of every route gets a number, its *slot*: routes in order, hops of a route one after the other, so that the
slots before and after on a route are `slot - 1` and `slot + 1`. Workers are numbered 0, 1, ... in ascending order of
their ids. A *channel* carries what one worker makes for one worker in one direction, in order; it too has a number.
Operations have *codes*: of n slots, slot for F, slot + n for B or I, and slot + 2n for W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, Plan, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule.components import Component, HopPath, components, records_of_routes
from chameleon_ft.schedule.costs import CostModel, PipelineTimes, pipeline_times
from chameleon_ft.schedule.records import CHANNEL, OPERATION, SLOT, Integers, Records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """The slots of the routes of a plan, and what follows from them.

    Attributes:
        workers: ids of the workers by index.
        channels: by number, `CHANNEL`.
        split_backward: whether there are codes of W.
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
