"""Arrays that the kernels of the memory model read and fill."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.schedule.records import Booleans, Floats, Integers

OPTION: Final = np.dtype(
    [
        ("full", "i8"),
        ("selective", "i8"),
        ("recompute_s", "f8"),
        ("in_flight", "i8"),
        ("deferred", "i8"),
        ("each", "i8"),
        ("waiting", "i8"),
        ("forward", "i8"),
        ("backward", "i8"),
        ("weight", "i8"),
        ("fixed", "i8"),
        ("spare", "i8"),
    ],
    align=True,
)
"""A way to recompute a stage on a worker of some capacity, in bytes and seconds.

full, selective: how many layers are recomputed in full, from the first one on, and selectively, after those.
recompute_s: how long that takes for a micro-batch. in_flight: micro-batches that can be in flight. deferred: W that can
wait when nothing is in flight. each: bytes of a micro-batch in flight. waiting: bytes of a micro-batch whose W waits.
forward, backward, weight: the most bytes that F, B or I, and W need, those of their own micro-batch included. fixed:
bytes of state and samples. spare: bytes that these leave of the worker's memory.
"""


class LayerFigures(NamedTuple):
    """Bytes by layer of a model with L layers, int64 [L] each unless stated otherwise.

    Attributes:
        state: parameters, gradients and optimizer state.
        sample: cached samples.
        activation: activations kept from F to B.
        input: output of the layer before, which a layer that is recomputed in full keeps; zero for the first layer.
        output: message to the next layer; zero for the last layer.
        selective: activations kept if the layer is recomputed selectively; `activation` if it cannot be.
        weight_grad, selective_weight_grad: tensors that I leaves for W, without and with selective recomputation.
        working, selective_working: additional bytes while F or B of the layer runs.
        halves_working: additional bytes while I or W of the layer runs.
        is_recomputable: bool [L].
        forward_s, selective_s: seconds of recomputation in full and selectively, at speed 1; float64 [L].
    """

    state: Integers
    sample: Integers
    activation: Integers
    input: Integers
    output: Integers
    selective: Integers
    weight_grad: Integers
    selective_weight_grad: Integers
    working: Integers
    selective_working: Integers
    halves_working: Integers
    is_recomputable: Booleans
    forward_s: Floats
    selective_s: Floats
