"""A plan under a cost model as flat lists of numbers, which is what the scheduler's inner loop can read fast.

Every hop of every route gets a number, its *slot*: routes in order, hops of a route one after the other, so that the
slots before and after on a route are `slot - 1` and `slot + 1`. Workers are numbered 0, 1, ... in ascending order of
their ids. A *channel* carries what one worker makes for one worker in one direction, in order; it too has a number.
Operations have *codes*: of n slots, slot for F, slot + n for B or I, and slot + 2n for W.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import Hop, Plan
from chameleon_ft.schedule._components import different_ways
from chameleon_ft.schedule._longest_path import Dependencies, longest_path
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.program import OperationKind


@dataclass(frozen=True, slots=True)
class Channel:
    """From and to which worker (indices), and whether it brings gradients.

    A worker's channel to itself carries local hand-overs, and from its F to its B where a route turns.
    """

    sender: int
    receiver: int
    gradient: bool


@dataclass(slots=True, kw_only=True)
class Slots:
    """Lists by slot. Times in seconds.

    Attributes:
        worker: index of the slot's worker.
        last: whether the slot is the last of its route.
        forward_s, backward_s, weight_s: durations of F, of B or I, and of W (zero where there is none).
        down_s, up_s: message time of F's result and of B's or I's.
        down, up: channel of F's result and of B's or I's; `up` is -1 for the first slot of a route.
    """

    worker: list[int]
    last: list[bool]
    forward_s: list[float]
    backward_s: list[float]
    weight_s: list[float]
    down_s: list[float]
    up_s: list[float]
    down: list[int]
    up: list[int]

    def key(self) -> tuple[tuple[float, ...], ...]:
        """Equal for slots that are equal."""
        return (
            tuple(self.worker),
            tuple(self.forward_s),
            tuple(self.backward_s),
            tuple(self.weight_s),
            tuple(self.down_s),
            tuple(self.up_s),
        )

    def extend(self, other: Slots) -> None:
        self.worker += other.worker
        self.last += other.last
        self.forward_s += other.forward_s
        self.backward_s += other.backward_s
        self.weight_s += other.weight_s
        self.down_s += other.down_s
        self.up_s += other.up_s
        self.down += other.down
        self.up += other.up


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The slots of the routes of a plan, and what follows from them.

    Attributes:
        workers: ids of the workers by index.
        channels: by number.
        split_backward: whether there are codes of W.
        slots: lists by slot.
        dependencies: lists by code.
    """

    workers: tuple[int, ...]
    channels: tuple[Channel, ...]
    split_backward: bool
    slots: Slots
    dependencies: Dependencies

    def step_s(self, orders: Sequence[Sequence[int]]) -> float:
        """Seconds of a replay of the operations with these codes, by worker index."""
        return max(longest_path(orders, self.dependencies)[1])

    def lower_bound_s(self) -> float:
        """Seconds that no order of the operations can beat.

        For each worker: the shortest way of a micro-batch to it, all it has to compute, and the shortest way on from
        there. A W may come last of all, but the last F or I is followed by the Is of the workers before, and their W.
        """
        slots = self.slots
        count = len(self.workers)
        before = [math.inf] * count
        after = [math.inf] * count
        work_s = [0.0] * count
        weight_s = [0.0] * count
        down_s = back_s = 0.0
        for slot, worker in enumerate(slots.worker):
            if slots.up[slot] < 0:
                down_s, back_s = 0.0, slots.weight_s[slot]
            before[worker] = min(before[worker], down_s)
            after[worker] = min(after[worker], back_s + slots.up_s[slot])
            work_s[worker] += slots.forward_s[slot] + slots.backward_s[slot]
            weight_s[worker] += slots.weight_s[slot]
            down_s += slots.forward_s[slot] + slots.down_s[slot]
            back_s += slots.backward_s[slot] + slots.up_s[slot]
        return max(before[w] + work_s[w] + max(weight_s[w], after[w]) for w in range(count) if before[w] < math.inf)


class NetworkBuilder:
    """Builds networks of routes between the same workers; remembers the numbers of every route it has seen."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        if plan.placement.num_layers != len(costs.workload.layers):
            raise PlanError(
                f"the plan places {plan.placement.num_layers} layers, but the workload has "
                f"{len(costs.workload.layers)}; use the workload of the model that is planned"
            )
        self._times = _Times(costs, plan.recompute)
        self._split = plan.split_backward
        self._start(plan.workers)

    def part(self, workers: tuple[int, ...]) -> NetworkBuilder:
        """A builder for routes between some of the workers, which are numbered in the order in which they are given."""
        part = copy(self)
        part._start(workers)
        return part

    def _start(self, workers: tuple[int, ...]) -> None:
        self.workers = workers
        self._index = {worker: index for index, worker in enumerate(workers)}
        self._channels: dict[Channel, int] = {}
        self._known: dict[tuple[Hop, ...], Slots] = {}

    def network(self, routes: Iterable[tuple[Hop, ...]]) -> Network:
        """The network of these routes, each given by its hops."""
        slots = Slots(worker=[], last=[], forward_s=[], backward_s=[], weight_s=[], down_s=[], up_s=[], down=[], up=[])
        ways, taken = different_ways(routes)
        of_ways = [self.slots(hops) for hops in ways]
        for way in taken:
            slots.extend(of_ways[way])
        return Network(
            workers=self.workers,
            channels=tuple(self._channels),
            split_backward=self._split,
            slots=slots,
            dependencies=_dependencies(slots, split_backward=self._split),
        )

    def slots(self, hops: tuple[Hop, ...]) -> Slots:
        """Those of one route."""
        found = self._known.get(hops)
        if found is None:
            found = self._known[hops] = self._slots(hops)
        return found

    def _slots(self, hops: tuple[Hop, ...]) -> Slots:
        workers = [self._index[hop.worker] for hop in hops]
        message_s = [self._times.message_s(hop, after.worker) for hop, after in pairwise(hops)]
        downs = [self._channel(*pair, gradient=False) for pair in pairwise(workers)]
        ups = [self._channel(after, before, gradient=True) for before, after in pairwise(workers)]
        return Slots(
            worker=workers,
            last=[False] * (len(hops) - 1) + [True],
            forward_s=[self._times.compute_s(hop, OperationKind.FORWARD) for hop in hops],
            backward_s=[
                self._times.compute_s(hop, OperationKind.INPUT_GRAD if self._split else OperationKind.BACKWARD)
                for hop in hops
            ],
            weight_s=[self._times.compute_s(hop, OperationKind.WEIGHT_GRAD) if self._split else 0.0 for hop in hops],
            down_s=[*message_s, 0.0],
            up_s=[0.0, *message_s],
            down=[*downs, self._channel(workers[-1], workers[-1], gradient=True)],
            up=[-1, *ups],
        )

    def _channel(self, sender: int, receiver: int, *, gradient: bool) -> int:
        return self._channels.setdefault(Channel(sender, receiver, gradient), len(self._channels))


class _Times:
    """Remembers the few different times that operations and messages have."""

    def __init__(self, costs: CostModel, recompute: frozenset[int]) -> None:
        self._costs = costs
        self._recompute = recompute
        self._worker = costs.cluster.worker
        self._operation_s: dict[tuple[float, bool, OperationKind, int, int], float] = {}
        self._between_s: dict[tuple[bool, int], float] = {}

    def compute_s(self, hop: Hop, kind: OperationKind) -> float:
        recompute = hop.worker in self._recompute
        key = self._costs.pace(hop.worker), recompute, kind, hop.layers.start, hop.layers.stop
        found = self._operation_s.get(key)
        if found is None:
            found = self._costs.compute_s(hop.worker, kind, hop.layers, recompute=recompute)
            self._operation_s[key] = found
        return found

    def message_s(self, hop: Hop, after: int) -> float:
        """The activation after `hop`, and its gradient back: links are the same both ways."""
        if hop.worker == after:
            return 0.0
        key = self._worker(hop.worker).host == self._worker(after).host, hop.layers.stop
        found = self._between_s.get(key)
        if found is None:
            num_bytes = self._costs.message_bytes(hop.layers.stop - 1)
            found = self._between_s[key] = self._costs.message_s(hop.worker, after, num_bytes)
        return found


def _dependencies(slots: Slots, *, split_backward: bool) -> Dependencies:
    """What the operations need, by their codes."""
    count = len(slots.worker)
    needs = [slot - 1 if up >= 0 else -1 for slot, up in enumerate(slots.up)]
    needs += [slot if last else count + slot + 1 for slot, last in enumerate(slots.last)]
    # No message goes into the first slot of a route or out of the last, so that those beside them may be read as well.
    delay_s = [0.0, *slots.down_s[:-1], *slots.up_s[1:], 0.0]
    duration_s = slots.forward_s + slots.backward_s
    if split_backward:
        needs += range(count, 2 * count)
        delay_s += [0.0] * count
        duration_s += slots.weight_s
    return Dependencies(needs=needs, delay_s=delay_s, duration_s=duration_s)
