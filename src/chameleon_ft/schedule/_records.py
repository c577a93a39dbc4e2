"""What kernels and networks exchange: arrays of numbers and of records."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Booleans: TypeAlias = NDArray[np.bool_]
Records: TypeAlias = NDArray[np.void]

SLOT: Final = np.dtype(
    [
        ("worker", np.int64),
        ("down", np.int64),
        ("up", np.int64),
        ("forward_s", np.float64),
        ("backward_s", np.float64),
        ("weight_s", np.float64),
        ("down_s", np.float64),
        ("up_s", np.float64),
        ("last", np.bool_),
        ("start", np.int64),
        ("stop", np.int64),
    ],
    align=True,
)
"""A slot of a network. Times in seconds.

worker: index of the slot's worker. down, up: channel of F's result and of B's or I's; `up` is -1 for the first slot of
a route. forward_s, backward_s, weight_s: durations of F, of B or I, and of W (zero where there is none). down_s, up_s:
message time of F's result and of B's or I's. last: whether the slot is the last of its route. start, stop: its layers.
"""

CHANNEL: Final = np.dtype([("sender", np.int64), ("receiver", np.int64), ("gradient", np.bool_)], align=True)
"""A channel: from and to which worker (indices), and whether it brings gradients.

A worker's channel to itself carries local hand-overs, and from its F to its B where a route turns.
"""

OPERATION: Final = np.dtype([("needs", np.int64), ("delay_s", np.float64), ("duration_s", np.float64)], align=True)
"""What an operation needs and how long it takes.

needs: the number of the operation that has to end before, besides those of the same worker; -1 where there is none. One
that never runs is written as the operation's own number. delay_s: seconds that a message from there takes. duration_s:
seconds that the operation takes.
"""

PROGRAM_RECORD: Final = np.dtype(
    [
        ("kind", "u1"),
        ("micro_batch", "<i4"),
        ("hop", "<i4"),
        ("start", "<i4"),
        ("stop", "<i4"),
        ("receive_from", "<i4"),
        ("send_to", "<i4"),
        ("first", "?"),
        ("last", "?"),
        ("recompute", "?"),
    ]
)
"""An operation of a program, as `Operation` has it.

kind: F, B, I, W are 0, 1, 2, 3. start, stop: its layers. receive_from, send_to: -1 for no worker.
"""
