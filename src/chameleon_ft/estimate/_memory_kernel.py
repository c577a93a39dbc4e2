"""The way of workers through their operations that `estimate.memory` tells of, compiled by numba."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.estimate._memory_records import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Integers, Records

_HOP: Final = np.dtype([("shared", np.int64), ("handed", np.int64)], align=True)
"""What there is of a hop.

shared: bytes of its input that are the output of the hop before, on this worker too, and counted there. handed: bytes
of the gradient that it has handed over to that hop, which has not used it yet.
"""

_SEND: Final = np.dtype([("num_bytes", np.int64), ("before", np.int64)], align=True)
"""A gradient that was sent, and the number of the one before it to the same receiver."""

_HELD: Final = np.dtype(
    [
        ("activations", np.int64),
        ("weight_grads", np.int64),
        ("sent", np.int64),
        ("handed", np.int64),
        ("first_send", np.int64),
        ("sends", np.int64),
        ("worst", np.int64),
    ],
    align=True,
)
"""Bytes that a worker holds; the numbers of its first send and of the next; the most bytes it ever held."""


class _Walk(NamedTuple):
    """What a worker has to run, and how far it has come.

    Attributes:
        operations, stages, moments: see `_memory_records`.
        ahead, kept: of `MessageBuffers`.
        hops: `_HOP`.
        sends: `_SEND`, of one worker after the other.
        latest: by index of the receiver, the number of the latest send to it by any worker; -1 if there is none.
        held: one `_HELD`.
        worst: one `WORST` for each worker.
    """

    operations: Records
    stages: Records
    moments: Records
    ahead: int
    kept: int
    hops: Records
    sends: Records
    latest: Integers
    held: Records
    worst: Records


def worst_moments(
    operations: Records, first: Integers, stages: Records, moments: Records, *, ahead: int, kept: int, worst: Records
) -> None:
    """Write into `worst` when each worker holds most.

    Args:
        operations: worker by worker, see `_memory_records`.
        first: the place of each worker's first operation; in the end their number.
        stages, moments: see `_memory_records`.
        ahead, kept: of `MessageBuffers`.
        worst: one for each worker, to be filled.
    """
    count = len(operations)
    hops, sends, held = np.zeros(count, _HOP), np.empty(count, _SEND), np.zeros(1, _HELD)
    latest = np.full(1 + max(operations["sends_to"].max(initial=-1), 0), -1)
    walk = _Walk(operations, stages, moments, ahead, kept, hops, sends, latest, held, worst)
    _walk_all(walk, first, np.zeros(count + 1, np.int64))


@lean_kernel
def _walk_all(walk: _Walk, first: Integers, until: Integers) -> None:
    held = walk.held[0]
    for worker in range(len(first) - 1):
        held.activations = held.weight_grads = held.sent = held.handed = 0
        held.first_send = held.sends
        held.worst = -1
        walk.worst[worker].place = -1
        _walk_one(walk, worker, first[worker], first[worker + 1], until)


@lean_part
def _walk_one(walk: _Walk, worker: int, start: int, stop: int, until: Integers) -> None:
    held = walk.held[0]
    # Bytes of all messages up to each that is received, in their order.
    num_receives = 0
    for place in range(start, stop):
        own = walk.operations[place]
        if own.receives:
            stage = walk.stages[own.stage]
            until[num_receives + 1] = until[num_receives] + (stage.below if own.kind == FORWARD else stage.above)
            num_receives += 1
    received = 0
    for place in range(start, stop):
        # Receives that are asked for: when the operation begins to wait, and while it runs.
        posted = min(received + walk.ahead, num_receives)
        messages = until[posted] - until[received] + held.sent + held.handed
        held_then = held.activations + held.weight_grads + messages
        if held_then > held.worst:
            held.worst = held_then
            _remember(walk, worker, place, held.activations, held.weight_grads, messages, 0)
        if walk.operations[place].receives:
            received += 1
        _run(walk, worker, place, until[posted] - until[received])


@lean_part
def _run(walk: _Walk, worker: int, place: int, waiting: int) -> None:
    own, held = walk.operations[place], walk.held[0]
    if own.kind == FORWARD:
        _forward(walk, worker, place, waiting)
    elif own.kind == BACKWARD:
        _backward(walk, worker, place, waiting)
    elif own.kind == INPUT_GRAD:
        if own.first:
            # It computes nothing: until W all that the hop keeps stays, and the gradient that has come.
            held.weight_grads += _received(walk, place)
            held.activations -= _answered(walk, place)
        else:
            _input_grad(walk, worker, place, waiting)
    elif own.first:
        held.weight_grads -= _received(walk, place)
        held.activations += _answered(walk, place)
        _backward(walk, worker, place, waiting)
    else:
        _weight_grad(walk, worker, place, waiting)


@lean_part
def _forward(walk: _Walk, worker: int, place: int, waiting: int) -> None:
    own, held = walk.operations[place], walk.held[0]
    hop, stage = walk.hops[own.hop], walk.stages[own.stage]
    if not own.receives:
        hop.shared = stage.below
    _compute(walk, worker, place, FORWARD, waiting)
    # The output is kept, by the hop or as a message, until the gradient that answers it is there.
    held.activations += stage.activations + stage.above - hop.shared


@lean_part
def _backward(walk: _Walk, worker: int, place: int, waiting: int) -> None:
    """A B, or the W of a first hop, which is one."""
    own, held = walk.operations[place], walk.held[0]
    stage = walk.stages[own.stage]
    held.activations -= stage.activations + stage.above - walk.hops[own.hop].shared
    _compute(walk, worker, place, BACKWARD, waiting + _received(walk, place))
    _pass_on(walk, place)


@lean_part
def _input_grad(walk: _Walk, worker: int, place: int, waiting: int) -> None:
    own, held = walk.operations[place], walk.held[0]
    stage = walk.stages[own.stage]
    held.activations -= stage.activations + stage.above - walk.hops[own.hop].shared
    walk.hops[own.hop].shared = 0
    _compute(walk, worker, place, INPUT_GRAD, waiting)
    held.weight_grads += stage.weight_grads
    _pass_on(walk, place)


@lean_part
def _weight_grad(walk: _Walk, worker: int, place: int, waiting: int) -> None:
    own = walk.operations[place]
    stage = walk.stages[own.stage]
    walk.held[0].weight_grads -= stage.weight_grads
    _compute(walk, worker, place, WEIGHT_GRAD, waiting)


@lean_part
def _pass_on(walk: _Walk, place: int) -> None:
    """A hop's backward is done: its activations are not needed any more, and its gradient goes on."""
    own, held = walk.operations[place], walk.held[0]
    hop, stage = walk.hops[own.hop], walk.stages[own.stage]
    hop.shared = 0
    if own.after >= 0:
        held.handed -= walk.hops[own.after].handed
        walk.hops[own.after].handed = 0
    if own.first:
        return
    if own.sends_to >= 0:
        _send(walk, own.sends_to, stage.below)
    else:
        held.handed += stage.below
        hop.handed = stage.below


@lean_part
def _received(walk: _Walk, place: int) -> int:
    """Bytes of the gradient that a hop's backward starts from, where another worker has sent it."""
    own = walk.operations[place]
    if own.after >= 0 and walk.hops[own.after].handed > 0:
        return 0
    above: int = walk.stages[own.stage].above
    return above


@lean_part
def _answered(walk: _Walk, place: int) -> int:
    """Bytes of a hop's output that the hop does not keep itself: when the gradient is there, they are let go of."""
    stage = walk.stages[walk.operations[place].stage]
    let_go: int = stage.above - stage.output
    return let_go


@lean_part
def _send(walk: _Walk, receiver: int, num_bytes: int) -> None:
    """Keep a gradient that is sent, and let go of the earliest to this receiver if there are too many."""
    held, send = walk.held[0], walk.held[0].sends
    walk.sends[send].num_bytes, walk.sends[send].before = num_bytes, walk.latest[receiver]
    walk.latest[receiver] = send
    held.sends += 1
    held.sent += num_bytes
    for _ in range(walk.kept):
        send = walk.sends[send].before
        if send < held.first_send:
            return
    held.sent -= walk.sends[send].num_bytes


@lean_part
def _compute(walk: _Walk, worker: int, place: int, kind: int, messages: int) -> None:
    """Remember what is held while the operation runs as one of this kind, if it is more than ever before."""
    own, held = walk.operations[place], walk.held[0]
    moment = walk.moments[own.stage, kind]
    activations = held.activations - walk.hops[own.hop].shared + moment.activation_bytes
    weight_grads = held.weight_grads + moment.weight_grad_bytes
    messages += held.sent + held.handed + moment.message_bytes
    total = activations + weight_grads + messages + moment.working_bytes
    if total > held.worst:
        held.worst = total
        _remember(walk, worker, place, activations, weight_grads, messages, moment.working_bytes)


@lean_part
def _remember(
    walk: _Walk, worker: int, place: int, activations: int, weight_grads: int, messages: int, working: int
) -> None:
    worst = walk.worst[worker]
    worst.place = place
    worst.activation_bytes, worst.weight_grad_bytes = activations, weight_grads
    worst.message_bytes, worst.working_bytes = messages, working
