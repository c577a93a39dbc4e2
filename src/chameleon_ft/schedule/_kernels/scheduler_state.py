"""The state of the list scheduler's event loop, by slot, worker and queue.

All times are in seconds since the start of the step. Queues are linked lists. A slot waits in one queue for its F, then
in one for its B or I, then for its W. In the rest of an interrupted step it may wait for its F and another operation at
the same time, so there are two links.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.schedule.records import Integers, Records

HOP: Final = np.dtype(
    [
        ("rank", "i8"),
        ("next", "i8"),
        ("next_backward", "i8"),
        ("forward_at", "f8"),
        ("backward_at", "f8"),
        ("lacks_forward", "?"),
    ],
    align=True,
)
"""State of a slot.

rank: of a worker's ready forwards, or backwards, the lowest rank goes first. next,
next_backward: the slots behind it in its queues for F, and for B, I or W, or -1. forward_at, backward_at: when the
inputs of F, and of B or I, arrive; zero at the start of a route. lacks_forward: whether its F has not begun.
"""

WORKER: Final = np.dtype(
    [
        ("room", "i8"),
        ("kept", "i8"),
        ("deferred", "i8"),
        ("free", "f8"),
        ("done", "i8"),
        ("sending", "i8"),
        ("denied", "?"),
        ("starts", "i8"),
        ("pending", "i8"),
        ("forward_in", "i8"),
        ("backward_in", "i8"),
    ],
    align=True,
)
"""State of a worker.

room, kept, deferred: how many more micro-batches it may put in flight, keep, and leave waiting for their W. free: when
its operation ends. done: the place of its next code. sending: the channel that it sent into last, the only one that can
block it; or -1. denied: whether it had an operation ready that would have closed a cycle of blocked workers. starts,
pending: the queues of the routes that start on it, and of slots whose W is to be run. forward_in, backward_in: the
first of the queues that bring it inputs, or -1.
"""

QUEUE: Final = np.dtype(
    [
        ("sender", "i8"),
        ("receiver", "i8"),
        ("gradient", "?"),
        ("remote", "?"),
        ("awaited", "?"),
        ("head", "i8"),
        ("tail", "i8"),
        ("next_in", "i8"),
    ],
    align=True,
)
"""A queue of slots: a channel, the routes that start on a worker, or the W that it has to run.

gradient: whether slots wait in it for B, I or W. remote: whether sender and receiver are different workers. awaited:
whether its sender had an operation ready, but must not run ahead of it. head, tail: its first and last slot; head is -1
if it is empty. next_in: the next queue that brings the receiver inputs of the same kind, or -1.
"""

EVENT: Final = np.dtype([("at_s", "f8"), ("worker", "i8")], align=True)
"""When a worker is to decide."""

STATE: Final = np.dtype(
    [("slack_s", "f8"), ("events", "i8"), ("denied", "?"), ("strained", "?"), ("beyond_limits", "?")], align=True
)
"""Scalars.

slack_s: arrivals up to this much later count as simultaneous. events: their number. denied: whether any worker is.
strained, beyond_limits: as in `Schedule`.
"""


class Run(NamedTuple):
    """One run of the scheduler: its input, its state, and the resulting codes.

    Attributes:
        slots, channels: of the network; `SLOT` [slots] and `CHANNEL` [channels].
        first: the place in `codes` of each worker's first operation, and in the end their number; int64 [workers + 1].
        limits: micro-batches in flight, kept and deferred; int64 [3, workers].
        by_priority: the first slot of each route, the highest priority first; int64 [routes].
        forward_first, patience, gradients_only: of `Rules`.
        hops: `HOP` [slots], zeros at first, as all state.
        workers: `WORKER` [workers].
        queues: `QUEUE` [channels + 2 workers]: channels, then starts and pending of each worker.
        codes: the result, worker by worker; int64 [operations].
        events: a binary heap; `EVENT` [capacity].
        state: `STATE` [1].
    """

    slots: Records
    channels: Records
    first: Integers
    limits: Integers
    by_priority: Integers
    forward_first: bool
    patience: float
    gradients_only: bool
    hops: Records
    workers: Records
    queues: Records
    codes: Integers
    events: Records
    state: Records
