"""The inner loops of `search._bounds`, compiled by numba: matrices are by micro-batches, start and stop of a stage."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.schedule._kernels.jit import kernel
from chameleon_ft.schedule._records import Floats, Integers


@kernel
def stage_bounds(
    counts: Integers,
    forward_s: Floats,
    backward_s: Floats,
    weight_s: Floats,
    message_s: Floats,
    first_s: Floats,
    after_s: Floats,
    rooms: NDArray[np.bool_],
    forwards: Integers,
    weight_grads: Integers,
) -> tuple[Floats, Floats]:
    """`computed_s` and `returned_s` of a first stage.

    Args:
        counts: numbers of micro-batches.
        forward_s, backward_s, weight_s, message_s: of `StageTimes`.
        first_s: `returned_s` of the stages after it for one micro-batch.
        after_s: the same for as many as there are.
        rooms: whether a stage fits; empty where memory is no matter.
        forwards, weight_grads: of `HeldBack`; then empty as well.
    """
    size = len(forward_s)
    computed_s = np.full((len(counts), size, size), math.inf)
    returned_s = np.full((len(counts), size), math.inf)
    for place in range(len(counts)):
        count = counts[place]
        for start in range(size):
            for stop in range(start + 1, size):
                if rooms.size and not rooms[place, start, stop]:
                    continue
                forward, backward, weight = forward_s[start, stop], backward_s[start, stop], weight_s[start, stop]
                messages_s = 2 * message_s[stop]
                own_s, work_s = count * (forward + backward), count * (forward + backward + weight)
                if rooms.size:
                    back_s = forward + messages_s + first_s[stop]
                    idle_s = max(0.0, back_s - forwards[place, start, stop] * forward)
                    own_s += idle_s + weight_grads[place, start, stop] * weight
                    work_s += idle_s
                own_s = max(own_s, forward + backward + messages_s + after_s[place, stop])
                computed_s[place, start, stop] = max(work_s, own_s + weight)
                returned_s[place, start] = min(returned_s[place, start], own_s)
    return computed_s, returned_s


@kernel
def end_bounds(computed_s: Floats, sync_s: Floats, down_s: Floats, after_s: Floats) -> Floats:
    """By micro-batches and start: until a first stage and all after it have reduced their gradients.

    Args:
        computed_s: of the first stage.
        sync_s: of its gradients.
        down_s: of `StageTimes`.
        after_s: the same of the stages after it.
    """
    counts, size, _ = computed_s.shape
    ended_s = np.full((counts, size), math.inf)
    for place in range(counts):
        for start in range(size):
            for stop in range(size):
                own_s = computed_s[place, start, stop] + sync_s[start, stop]
                own_s = max(own_s, down_s[start, stop] + after_s[place, stop])
                ended_s[place, start] = min(ended_s[place, start], own_s)
    return ended_s
