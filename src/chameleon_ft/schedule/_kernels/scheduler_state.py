"""The state of the list scheduler's event loop, by slot, worker and channel."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.schedule.jit import kernel
from chameleon_ft.schedule.records import Integers, Records

# Arrivals this close (relative to the longest operation) differ by rounding only.
_SLACK: Final = 1e-9

_HOP: Final = np.dtype([("rank", np.int64), ("forward_at", np.float64), ("backward_at", np.float64)], align=True)
"""Slot state. Times in seconds.

rank: of the ready forwards, or backwards, of a worker, the one with the lowest rank goes first. forward_at,
backward_at: when the input of F, and of B or I, arrives; zero at the start of a route.
"""

_WORKER: Final = np.dtype(
    [
        ("room", np.int64),
        ("kept", np.int64),
        ("deferred", np.int64),
        ("free", np.float64),
        ("sending", np.int64),
        ("denied", np.bool_),
        ("next_denied", np.int64),
        ("done", np.int64),
        ("pending", np.int64),
        ("pending_end", np.int64),
        ("forward_in", np.int64),
        ("forward_in_end", np.int64),
        ("backward_in", np.int64),
        ("backward_in_end", np.int64),
    ],
    align=True,
)
"""Worker state.

room, kept: how many more micro-batches it may put in flight, and keep. deferred: how many W may
wait. free: when its operation ends. sending: the
channel that it sent into last, the only one that can block it; or -1. denied: whether it had an operation ready that
would have closed a cycle of blocked workers; next_denied: the worker denied before it, or -1 (a linked list). done: the
place of its next code. The rest are ranges of places in `Run.lists`: pending, slots whose W is to be run; forward_in
and backward_in, the queues that bring it tensors.
"""

_QUEUE: Final = np.dtype(
    [
        ("sender", np.int64),
        ("receiver", np.int64),
        ("gradient", np.bool_),
        ("remote", np.bool_),
        ("awaited", np.bool_),
        ("head", np.int64),
        ("tail", np.int64),
    ],
    align=True,
)
"""A queue of slots: a channel, or the routes that start on a worker.

remote: whether sender and receiver are different workers. awaited: whether its sender had an operation ready, but must
not run ahead of it. head, tail: places in `Run.lists`, of its first slot, and of the next one to be added.
"""

_EVENT: Final = np.dtype([("at_s", np.float64), ("worker", np.int64)], align=True)
"""When a worker is to decide."""

_STATE: Final = np.dtype(
    [
        ("split", np.bool_),
        ("forward_first", np.bool_),
        ("patience", np.float64),
        ("gradients_only", np.bool_),
        ("slack_s", np.float64),
        ("events", np.int64),
        ("denied", np.int64),
        ("strained", np.bool_),
        ("beyond_limits", np.bool_),
    ],
    align=True,
)
"""Scalars: rules, the number of events, the worker that was denied an operation last (or -1), and results.

slack_s: arrivals up to this much later count as simultaneous.
"""


class Run(NamedTuple):
    """One run of the scheduler.

    Attributes:
        slots: of the network.
        hops: `_HOP` by slot.
        workers: `_WORKER`.
        queues: `_QUEUE` by channel, and then one by worker, of the routes that start there.
        lists: all lists one after the other; int64.
        codes: the result, worker by worker; int64 [operations].
        events: `_EVENT`, a binary heap.
        state: one `_STATE`.
    """

    slots: Records
    hops: Records
    workers: Records
    queues: Records
    lists: Integers
    codes: Integers
    events: Records
    state: Records


@kernel
def initial_state(
    slots: Records, channels: Records, limits: Integers, operations: int
) -> tuple[Records, Records, Records, Records, Integers, Integers, Records, Records]:
    """The parts of a `Run` at time zero; `operations` are run for each slot. `limits`: int64 [2, workers]."""
    num_slots, num_workers, num_channels = len(slots), limits.shape[1], len(channels)
    workers = np.zeros(num_workers, _WORKER)
    queues = np.zeros(num_channels + num_workers, _QUEUE)
    state = np.zeros(1, _STATE)
    state[0].denied = -1
    for channel in range(num_channels):
        queue, own = queues[channel], channels[channel]
        queue.sender, queue.receiver, queue.gradient = own.sender, own.receiver, own.gradient
        queue.remote = own.sender != own.receiver
    for worker in range(num_workers):
        queues[num_channels + worker].receiver = worker
    for slot in range(num_slots):
        own = slots[slot]
        state[0].slack_s = max(state[0].slack_s, _SLACK * own.forward_s, _SLACK * own.backward_s)
        # First the lengths of the lists, which become places below.
        workers[own.worker].pending_end += 1
        queues[own.down].tail += 1
        queues[own.up if own.up >= 0 else num_channels + own.worker].tail += 1
    for queue in range(len(queues)):
        own = workers[queues[queue].receiver]
        if queues[queue].gradient:
            own.backward_in_end += 1
        else:
            own.forward_in_end += 1
    lists = np.empty(3 * num_slots + len(queues), np.int64)
    place = done = 0
    for queue in range(len(queues)):
        own = queues[queue]
        place, own.head, own.tail = place + own.tail, place, place
    for worker in range(num_workers):
        own = workers[worker]
        own.room, own.kept, own.deferred = limits[0, worker], limits[1, worker], limits[2, worker]
        own.sending, own.done = -1, done
        done += operations * own.pending_end
        place, own.pending, own.pending_end = place + own.pending_end, place, place
        place, own.forward_in, own.forward_in_end = place + own.forward_in_end, place, place
        place, own.backward_in, own.backward_in_end = place + own.backward_in_end, place, place
    for queue in range(len(queues)):
        own = workers[queues[queue].receiver]
        if queues[queue].gradient:
            lists[own.backward_in_end] = queue
            own.backward_in_end += 1
        else:
            lists[own.forward_in_end] = queue
            own.forward_in_end += 1
    # An operation adds three events at most: its end, an arrival, and its sender's wake-up; a wake-up after a denial
    # follows an event of the denied worker's own.
    events = np.empty(3 * operations * num_slots + 3 * num_workers, _EVENT)
    codes = np.empty(operations * num_slots, np.int64)
    return slots, np.zeros(num_slots, _HOP), workers, queues, lists, codes, events, state
