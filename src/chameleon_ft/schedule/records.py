"""The array types of networks, programs and kernels."""

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
        ("runs_forward", np.bool_),
        ("runs_backward", np.bool_),
        ("runs_weight_grad", np.bool_),
        ("start", np.int64),
        ("stop", np.int64),
    ],
    align=True,
)
"""A slot of a network. Times in seconds.

worker: index of the slot's worker. down, up: channel of F's result and of B's or I's; `up` is -1 for the first slot of
a route. forward_s, backward_s, weight_s: durations of F, of B or I, and of W (zero where there is none). down_s, up_s:
message time of F's result and of B's or I's. last: whether the slot is the last of its route. runs_forward,
runs_backward, runs_weight_grad: whether F, B or I, and W are to be run; in a whole step only W may be missing. start,
stop: its layers.
"""

CHANNEL: Final = np.dtype([("sender", np.int64), ("receiver", np.int64), ("gradient", np.bool_)], align=True)
"""A channel: the indices of sender and receiver, and whether it carries gradients.

A worker's channel to itself carries tensors between its own hops, and from its F to its B where a route turns.
"""

OPERATION: Final = np.dtype([("needs", np.int64), ("delay_s", np.float64), ("duration_s", np.float64)], align=True)
"""The predecessor of an operation, and its times in seconds.

needs: the number of the operation whose output it needs; -1 for none, and its own number if no operation makes that.
delay_s: message time from there, or when the input arrives if no operation makes it. duration_s: how long the operation
takes.
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
        ("recompute_start", "<i4"),
        ("recompute_stop", "<i4"),
        ("recompute_selective", "<i4"),
    ]
)
"""An operation of a program, as `Operation` has it.

kind: F, B, I, W are 0, 1, 2, 3. start, stop: its layers. receive_from, send_to: -1 for no worker.
recompute_start, recompute_stop, recompute_selective: the layers that are recomputed, and how many of them, the last
ones, selectively; all 0 for none.
"""
