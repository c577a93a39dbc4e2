"""What `estimate.memory` and its kernel exchange: arrays of records."""

from __future__ import annotations

from typing import Final

import numpy as np

FORWARD: Final = 0
BACKWARD: Final = 1
INPUT_GRAD: Final = 2
WEIGHT_GRAD: Final = 3
"""Kinds of operations."""

OPERATION: Final = np.dtype(
    [
        ("kind", np.int64),
        ("hop", np.int64),
        ("after", np.int64),
        ("stage", np.int64),
        ("first", np.bool_),
        ("receives", np.bool_),
        ("sends_to", np.int64),
    ],
    align=True,
)
"""An operation: its kind; numbers of its hop, of the hop after it on its route if that is on the same worker, else -1,
and of its stage; whether its hop is the first; whether it receives a message; and the worker that it sends one to, as
an index that is the same for all operations of a worker, or -1.
"""

MOMENT: Final = np.dtype(
    [
        ("activation_bytes", np.int64),
        ("weight_grad_bytes", np.int64),
        ("message_bytes", np.int64),
        ("working_bytes", np.int64),
    ],
    align=True,
)
"""What an operation needs at its worst, by stage and kind."""

WORST: Final = np.dtype([("place", np.int64), *((name, np.int64) for name in MOMENT.names or ())], align=True)
"""The worst moment of a worker: the place of the operation that it is in then, or -1, and what it holds."""

STAGE: Final = np.dtype(
    [
        ("below", np.int64),
        ("above", np.int64),
        ("activations", np.int64),
        ("weight_grads", np.int64),
        ("output", np.int64),
    ],
    align=True,
)
"""Bytes of a range of layers: of the tensor that comes in from below, of that which leaves above, of the activations
that it keeps, of what it keeps for its weight gradients, and of its output if it keeps that itself, which it does not
if its last layer is recomputed.
"""
