"""The event loop of the list scheduler, on the flat numbers of a network.

Time goes on from decision to decision: a worker that is free takes one of the operations whose tensor is there. A
message is known to its receiver as soon as the operation that makes it starts, with the time at which it will arrive.

Channels hold one message, as in `check_program`: a worker may run one operation ahead of a channel that is full, and is
then held back until the receiver has taken a message out. It must not do so when the receiver is itself held back,
directly or through others, by this worker. So the decisions, in the order in which they are made, are a run with
blocking sends that comes to its end, and the program they make cannot deadlock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from chameleon_ft.schedule._network import Network

# With this patience and free messages the split schedule of a plain pipeline under the default limits meets its bound
# for every ratio of F, I and W that the tests try.
_PATIENCE: Final = 0.75
# Arrivals this close (relative to the longest operation) are at the same time but for rounding.
_SLACK: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How workers decide.

    Attributes:
        in_flight, kept: limits by worker index, as in `InFlightLimit`.
        forward_first: whether a forward goes before a backward when both are ready and the limits allow it.
        patience: a worker puts a weight gradient off when a tensor that it can use arrives before this share of it
            would be done.
        gradients_only: whether only gradients may be run ahead of a full channel. Then workers hold each other back in
            one direction only, which leaves fewer choices but hardly ever a dead end.
    """

    in_flight: tuple[int, ...]
    kept: tuple[int, ...]
    forward_first: bool
    patience: float = _PATIENCE
    gradients_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What each worker runs, and how long it takes.

    Attributes:
        orders: codes of operations by worker index, in order.
        step_s: end of the last operation in a replay, where nobody is held back.
        strained: whether some worker was denied an operation, or went beyond a limit because nobody could go on, though
            not only gradients might be run ahead.
        beyond_limits: whether the latter happened.
        dead_end: whether other rules had come to a dead end before.
    """

    orders: list[list[int]]
    step_s: float
    strained: bool = False
    beyond_limits: bool = False
    dead_end: bool = False


class Engine:
    """One run of the scheduler over a network; `run` may be called once.

    `rank` orders the slots of forwards, and of backwards, that are ready on a worker: the lowest goes first.
    """

    __slots__ = (
        "_backward_at",
        "_backward_in",
        "_beyond_limits",
        "_denied",
        "_events",
        "_forward_at",
        "_forward_first",
        "_forward_in",
        "_free",
        "_gradient",
        "_gradients_only",
        "_kept",
        "_network",
        "_orders",
        "_patience",
        "_pending",
        "_queues",
        "_rank",
        "_receivers",
        "_remote",
        "_room",
        "_sending",
        "_slack_s",
        "_slots",
        "_split",
        "_strained",
    )

    def __init__(self, network: Network, rules: Rules, rank: list[int]) -> None:
        slots = network.slots
        num_workers = len(network.workers)
        self._network = network
        self._slots = slots
        self._split = network.split_backward
        self._gradients_only = rules.gradients_only
        self._forward_first = rules.forward_first
        self._patience = rules.patience
        self._room = list(rules.in_flight)
        self._kept = list(rules.kept)
        self._rank = rank
        self._slack_s = _SLACK * max(max(slots.forward_s), max(slots.backward_s))
        self._receivers = [channel.receiver for channel in network.channels]
        self._gradient = [channel.gradient for channel in network.channels]
        self._remote = [channel.sender != channel.receiver for channel in network.channels]
        self._queues: list[deque[int]] = [deque() for _ in network.channels]
        self._forward_in: list[list[deque[int]]] = [[] for _ in range(num_workers)]
        self._backward_in: list[list[deque[int]]] = [[] for _ in range(num_workers)]
        for channel, queue in zip(network.channels, self._queues, strict=True):
            (self._backward_in if channel.gradient else self._forward_in)[channel.receiver].append(queue)
        # When the tensor that a forward or a backward of a slot needs is there; zero at the start of a route.
        self._forward_at = [0.0] * len(slots.worker)
        self._backward_at = [0.0] * len(slots.worker)
        starts: list[list[int]] = [[] for _ in range(num_workers)]
        for slot, up in enumerate(slots.up):
            if up < 0:
                starts[slots.worker[slot]].append(slot)
        for queues, own in zip(self._forward_in, starts, strict=True):
            queues.append(deque(sorted(own, key=rank.__getitem__)))
        self._pending: list[deque[int]] = [deque() for _ in range(num_workers)]
        self._orders: list[list[int]] = [[] for _ in range(num_workers)]
        self._free = [0.0] * num_workers
        # The channel that each worker sent into last: the only one that can hold it back.
        self._sending = [-1] * num_workers
        # Workers that had something ready but would have closed a circle of workers holding each other back.
        self._denied: set[int] = set()
        self._strained = False
        self._beyond_limits = False
        self._events = [(0.0, worker) for worker in range(num_workers)]

    def run(self) -> Schedule | None:
        """The schedule, or None at a dead end: whatever a worker runs next would leave workers that wait in a circle.

        When nobody can go on because of limits, the worker with the first ready forward goes beyond its own.
        """
        events, free, sending, queues = self._events, self._free, self._sending, self._queues
        remaining = len(self._slots.worker) * (3 if self._split else 2)
        now = 0.0
        while remaining:
            if events:
                now, worker = heappop(events)
                # The last message of a worker may wait for the one before it to be received.
                if free[worker] > now or ((channel := sending[worker]) >= 0 and len(queues[channel]) > 1):
                    continue
            else:
                worker = self._relax()
                if worker < 0:
                    return None
            end = self._decide(worker, now)
            if end >= 0:
                remaining -= 1
                free[worker] = end
                heappush(events, (end, worker))
        return Schedule(
            orders=self._orders,
            step_s=self._network.step_s(self._orders),
            strained=(self._strained or self._beyond_limits) and not self._gradients_only,
            beyond_limits=self._beyond_limits,
        )

    def _decide(self, worker: int, now: float) -> float:
        """Start the operation that `worker` should run now, if there is one; returns its end, or -1."""
        horizon = now + self._slack_s
        room, kept, pending = self._room[worker], self._kept[worker], self._pending[worker]
        forward = -1
        if room > 0 and self._forward_first:
            forward = self._ready_forward(worker, horizon)
            if forward >= 0:
                if kept > 0:
                    return self._start_forward(worker, forward, now)
                if pending:
                    return self._start_weight_grad(worker, now)
        backward = self._ready_backward(worker, horizon)
        if backward >= 0:
            return self._start_backward(worker, backward, now)
        if room > 0 and not self._forward_first:
            forward = self._ready_forward(worker, horizon)
            if forward >= 0 and kept > 0:
                return self._start_forward(worker, forward, now)
        if pending and (forward >= 0 or not self._better_soon(worker, horizon)):
            return self._start_weight_grad(worker, now)
        return -1.0

    def _ready_forward(self, worker: int, horizon: float) -> int:
        """The first forward by rank whose activation is there and whose result may be sent, or -1."""
        rank, at, down, queues = self._rank, self._forward_at, self._slots.down, self._queues
        best = -1
        for queue in self._forward_in[worker]:
            if queue:
                slot = queue[0]
                if at[slot] <= horizon and (best < 0 or rank[slot] < rank[best]):
                    channel = down[slot]
                    if not queues[channel] or self._may_send(worker, channel):
                        best = slot
        return best

    def _ready_backward(self, worker: int, horizon: float) -> int:
        """The first backward by rank whose gradient is there and whose result may be sent, or -1."""
        rank, at, up, queues = self._rank, self._backward_at, self._slots.up, self._queues
        best = -1
        for queue in self._backward_in[worker]:
            if queue:
                slot = queue[0]
                if at[slot] <= horizon and (best < 0 or rank[slot] < rank[best]):
                    channel = up[slot]
                    if not queues[channel] or self._may_send(worker, channel):
                        best = slot
        return best

    def _better_soon(self, worker: int, horizon: float) -> bool:
        """Whether a tensor that the worker can use arrives before its next weight gradient is well under way."""
        until = horizon + self._patience * self._slots.weight_s[self._pending[worker][0]]
        at = self._backward_at
        for queue in self._backward_in[worker]:
            if queue and horizon < at[queue[0]] < until:
                return True
        if self._room[worker] > 0 and self._kept[worker] > 0:
            at = self._forward_at
            for queue in self._forward_in[worker]:
                if queue and horizon < at[queue[0]] < until:
                    return True
        return False

    def _start_forward(self, worker: int, slot: int, now: float) -> float:
        slots, at = self._slots, self._forward_at[slot]
        self._room[worker] -= 1
        self._kept[worker] -= 1
        self._orders[worker].append(slot)
        end = (at if at > now else now) + slots.forward_s[slot]
        if slots.up[slot] < 0:
            # The queue of routes that start here is the last one.
            self._forward_in[worker][-1].popleft()
        else:
            self._take(slots.down[slot - 1], slots.worker[slot - 1], now)
        channel = slots.down[slot]
        if slots.last[slot]:
            self._backward_at[slot] = end
            self._queues[channel].append(slot)
        else:
            self._forward_at[slot + 1] = end + slots.down_s[slot]
            self._send(worker, channel, slot + 1, end + slots.down_s[slot])
        return end

    def _start_backward(self, worker: int, slot: int, now: float) -> float:
        slots, at = self._slots, self._backward_at[slot]
        self._room[worker] += 1
        if self._split:
            self._pending[worker].append(slot)
        else:
            self._kept[worker] += 1
        self._orders[worker].append(len(slots.worker) + slot)
        end = (at if at > now else now) + slots.backward_s[slot]
        if slots.last[slot]:
            self._queues[slots.down[slot]].popleft()
        else:
            self._take(slots.up[slot + 1], slots.worker[slot + 1], now)
        channel = slots.up[slot]
        if channel >= 0:
            self._backward_at[slot - 1] = end + slots.up_s[slot]
            self._send(worker, channel, slot - 1, end + slots.up_s[slot])
        return end

    def _start_weight_grad(self, worker: int, now: float) -> float:
        slot = self._pending[worker].popleft()
        self._kept[worker] += 1
        self._orders[worker].append(2 * len(self._slots.worker) + slot)
        return now + self._slots.weight_s[slot]

    def _send(self, worker: int, channel: int, slot: int, arrival: float) -> None:
        self._queues[channel].append(slot)
        if self._remote[channel]:
            self._sending[worker] = channel
            receiver = self._receivers[channel]
            # A receiver that is busy until then looks at its queues anyway when it is free.
            if self._free[receiver] < arrival:
                heappush(self._events, (arrival, receiver))

    def _take(self, channel: int, sender: int, now: float) -> None:
        queue = self._queues[channel]
        queue.popleft()
        if self._remote[channel] and (self._denied or (queue and self._sending[sender] == channel)):
            free = self._free[sender]
            heappush(self._events, (free if free > now else now, sender))
            for worker in self._denied:
                heappush(self._events, (now, worker))
            self._denied.clear()

    def _held_back(self, worker: int) -> bool:
        """Whether the last message of `worker` waits for the one before it to be received."""
        channel = self._sending[worker]
        return channel >= 0 and len(self._queues[channel]) > 1

    def _may_send(self, worker: int, channel: int) -> bool:
        """Whether sending into `channel` leaves no circle of workers that hold each other back."""
        if channel < 0 or not self._queues[channel] or not self._remote[channel]:
            return True
        if self._gradients_only and not self._gradient[channel]:
            self._denied.add(worker)
            return False
        holder = self._receivers[channel]
        while self._held_back(holder):
            holder = self._receivers[self._sending[holder]]
            if holder == worker:
                self._denied.add(worker)
                self._strained = True
                return False
        return True

    def _relax(self) -> int:
        """Let one worker that only its limits stop run one more forward; returns it, or -1 when there is none."""
        ready = [
            (self._rank[slot], worker)
            for worker in range(len(self._free))
            if not self._held_back(worker) and (slot := self._ready_forward(worker, math.inf)) >= 0
        ]
        if not ready:
            return -1
        _, worker = min(ready)
        self._room[worker] = max(1, self._room[worker])
        self._kept[worker] = max(1, self._kept[worker])
        self._beyond_limits = True
        return worker
