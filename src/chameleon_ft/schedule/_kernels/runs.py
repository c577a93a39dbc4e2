"""The state of the list scheduler's event loop: how far slots, workers and channels have come."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.schedule._kernels.jit import kernel
from chameleon_ft.schedule._records import Integers, Records

# Arrivals this close (relative to the longest operation) are at the same time but for rounding.
_SLACK: Final = 1e-9

_HOP: Final = np.dtype([("rank", np.int64), ("forward_at", np.float64), ("backward_at", np.float64)], align=True)
"""How far a slot has come.

rank: which forward, and which backward, of those that are ready on a worker goes first: the lowest. forward_at,
backward_at: when the tensor that its F, and its B or I, needs is there; zero at the start of a route.
"""

_WORKER: Final = np.dtype(
    [
        ("room", np.int64),
        ("kept", np.int64),
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
"""How far a worker has come.

room, kept: how much more it may put in flight, and keep. free: when it is. sending: the channel that it sent into last,
the only one that can hold it back; or -1. denied: whether it had something ready, but would have closed a circle of
workers holding each other back; next_denied: the one that was denied something before it, or -1. done: where its next
code goes. The rest are places in lists, up to those before which
they end: pending, slots whose W is to be run; forward_in and backward_in, the queues that bring it tensors.
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
"""A channel, or the routes that start on a worker.

remote: whether it carries messages, and not what a worker hands over to itself. awaited: whether its sender had
something for it, but was not to run ahead of it. head, tail: places in lists, from the
first slot that is in it up to where the next goes.
"""

_EVENT: Final = np.dtype([("at_s", np.float64), ("worker", np.int64)], align=True)
"""When a worker is to look what it can run."""

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
"""What there is only one of: rules, how many events there are, who was denied something last (or -1), and results."""


class Run(NamedTuple):
    """One run of the scheduler: what it is about, and how far it has come.

    Attributes:
        slots: of the network.
        hops: `_HOP` by slot.
        workers: `_WORKER`.
        queues: `_QUEUE` by channel, and then one for each worker, of the routes that start there.
        lists: all lists one after the other.
        codes: what each worker runs, one worker after the other.
        events: `_EVENT`, a heap.
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
def begun(
    slots: Records, channels: Records, in_flight: Integers, kept: Integers, operations: int
) -> tuple[Records, Records, Records, Records, Integers, Integers, Records, Records]:
    """The parts of a run in which everyone is free; so many operations are run for each slot."""
    num_slots, num_workers, num_channels = len(slots), len(in_flight), len(channels)
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
        # How long lists get, to begin with.
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
        own.room, own.kept, own.sending, own.done = in_flight[worker], kept[worker], -1, done
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
    # Every operation adds three events at most, and what is denied one for each worker at a time, beside those that it
    # was denied in.
    events = np.empty(3 * operations * num_slots + 3 * num_workers, _EVENT)
    codes = np.empty(operations * num_slots, np.int64)
    return slots, np.zeros(num_slots, _HOP), workers, queues, lists, codes, events, state
