"""The worst moments of workers, by the rules that `estimate.memory` sets out.

Every amount that a worker holds is a sum of changes, each of which follows from one operation alone. So operations need
not be gone through one by one: arrays below have an element for each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from chameleon_ft.schedule import OperationKind
from chameleon_ft.schedule._records import Integers, Records
from chameleon_ft.schedule.program import KINDS

__all__ = ["worst_moments"]

_FORWARD, _BACKWARD, _INPUT_GRAD, _WEIGHT_GRAD = (
    KINDS.index(kind)
    for kind in (OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.INPUT_GRAD, OperationKind.WEIGHT_GRAD)
)


def worst_moments(
    records: Records,
    starts: Integers,
    stages: Integers,
    moments: Integers,
    row_of: Integers,
    *,
    receives_ahead: int,
    sends_kept: int,
) -> tuple[Integers, Integers]:
    """When each worker holds most, and what.

    Args:
        records: operations of one worker after the other, `PROGRAM_RECORD` [operations].
        starts: the place of each worker's first operation, and in the end their number; int64 [workers + 1].
        stages: bytes of the layers of each operation: of the tensor that comes in from below, of that which leaves
            above, of the activations that are kept, of what is kept for the weight gradients, and of the output if the
            layers keep it themselves; int64 [operations, 5].
        moments: what an operation needs at its worst, by row and kind: bytes of activations, for weight gradients, of
            messages, and to work with; int64 [rows, 4, 4].
        row_of: of each operation, the row in `moments`; int64 [operations].
        receives_ahead, sends_kept: of `MessageBuffers`.

    Returns:
        The place of the operation that each worker is in then, or -1, int64 [workers]; and bytes as in `moments`, int64
        [workers, 4].
    """
    below, above, activations, weight_grads, output = stages.T
    kind, first = records["kind"], records["first"]
    receives, is_sent = records["receive_from"] >= 0, records["send_to"] >= 0
    forward = kind == _FORWARD
    # The I of a first hop computes nothing: what the hop keeps stays until its W, which is the backward in one go.
    idle, late = (kind == _INPUT_GRAD) & first, (kind == _WEIGHT_GRAD) & first
    backward = (kind == _BACKWARD) | late
    input_grad, weight_grad = (kind == _INPUT_GRAD) & ~first, (kind == _WEIGHT_GRAD) & ~first
    sum_before = _sums_before(starts)

    # From F to the backward; an input that comes from the same worker is counted as the output of the hop before.
    shared = np.where(np.where(forward, receives, is_sent), 0, below)
    # When the gradient is there, the output is let go of, unless the hop keeps it itself.
    answered = np.where(idle | late, above - output, 0)
    released = np.where(backward | input_grad, activations + above - shared - answered, 0)
    kept = np.where(forward, activations + above - shared, -np.where(idle, answered, 0))
    held_activations = sum_before(kept - released)

    # From I to W; at a first hop that is the gradient that came in.
    used = np.where(weight_grad, weight_grads, np.where(late, above, 0))
    held_weight_grads = sum_before(np.where(input_grad, weight_grads, np.where(idle, above, 0)) - used)

    # Gradients that go down, to another worker or to another hop of this one, which uses it up.
    gradient = np.where((backward | input_grad) & ~first, below, 0)
    is_used_up = ((kind == _BACKWARD) | (kind == _INPUT_GRAD)) & ~receives
    handed_over = np.where(is_sent, 0, gradient) - np.where(is_used_up, above, 0)
    sent = _sent(records, starts, gradient, sends_kept)
    held_messages = sum_before(handed_over + sent)

    # Receives are asked for when an operation begins to wait, some ahead.
    arrived = np.concatenate(([0], np.cumsum(receives)))
    asked_for = np.minimum(arrived[:-1] + receives_ahead, np.repeat(arrived[starts[1:]], np.diff(starts)))
    bytes_until = np.concatenate(([0], np.cumsum(np.where(forward, below, above)[receives])))
    waiting = np.stack([held_activations, held_weight_grads, held_messages, np.zeros_like(sent)], axis=1)
    waiting[:, 2] += bytes_until[asked_for] - bytes_until[arrived[:-1]]

    running = moments[row_of, np.where(late, _BACKWARD, kind)]
    running[:, 0] += held_activations - released - np.where(forward | backward, shared, 0)
    running[:, 1] += held_weight_grads - used
    running[:, 2] += held_messages + bytes_until[asked_for] - bytes_until[arrived[1:]]
    running[:, 2] += np.where(backward & (late | receives), above, 0)
    running[idle] = 0
    return _worst(np.stack([waiting, running], axis=1), starts)


def _sums_before(starts: Integers) -> Callable[[Integers], Integers]:
    """Of changes by operation, the sum of those by earlier operations of the same worker."""
    start_of = np.repeat(starts[:-1], np.diff(starts))

    def sums(changes: Integers) -> Integers:
        until = np.concatenate(([0], np.cumsum(changes)))
        found: Integers = until[:-1] - until[start_of]
        return found

    return sums


def _sent(records: Records, starts: Integers, gradient: Integers, sends_kept: int) -> Integers:
    """Changes in the bytes of sent gradients: of those to one receiver, only the latest few are held."""
    worker = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    receiver = np.where((records["kind"] != _FORWARD) & (records["send_to"] >= 0), records["send_to"], -1)
    sends = np.flatnonzero(receiver >= 0)
    # The sort is stable, so sends from one worker to another keep their order.
    order = sends[np.lexsort((receiver[sends], worker[sends]))]
    later, earlier = order[sends_kept:], order[:-sends_kept]
    alike = (worker[later] == worker[earlier]) & (receiver[later] == receiver[earlier])
    changes = np.zeros_like(gradient)
    changes[order] = gradient[order]
    changes[later] -= np.where(alike, gradient[earlier], 0)
    return changes


def _worst(amounts: Integers, starts: Integers) -> tuple[Integers, Integers]:
    """Of the amounts at each moment of each operation, [operations, moments, 4], the first of the largest by worker."""
    totals = amounts.sum(axis=2)
    places = np.full(len(starts) - 1, -1)
    found = np.zeros((len(starts) - 1, amounts.shape[2]), np.int64)
    for worker, (start, stop) in enumerate(pairwise(starts.tolist())):
        if stop > start:
            place, moment = divmod(int(totals[start:stop].argmax()), totals.shape[1])
            places[worker], found[worker] = start + place, amounts[start + place, moment]
    return places, found
