"""The inner loops of `search._memory`, compiled by numba; the formulas are explained there."""

from __future__ import annotations

from typing import Final, NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Integers

ANY: Final = 2**62
"""More micro-batches than there are."""

# Receives that are posted.
_AHEAD: Final = 4


class Holds(NamedTuple):
    """Matrices by start and stop of what a stage holds, and needs in its operations, in bytes.

    Attributes:
        fixed: parameters, gradients and optimizer state, and samples, which are kept at hand all the time.
        activations: of one micro-batch, from F to B.
        weight_grads: of one micro-batch, from I to W.
        output: of the message to the next stage; `both`: with that from the stage before.
        forward, backward, input_grad: the most that F, B and I need, the activations of their own micro-batch included,
            without messages that wait.
        working: the most that W needs on top of what is kept.
    """

    fixed: Integers
    activations: Integers
    weight_grads: Integers
    output: Integers
    both: Integers
    forward: Integers
    backward: Integers
    input_grad: Integers
    working: Integers


@lean_kernel
def stage_bytes(holds: Holds, split: bool, start: int, stop: int, in_flight: int, kept: int, micro_batches: int) -> int:
    """The most that a stage needs under these limits."""
    fixed, each = _need(holds, split, start, stop, min(in_flight, micro_batches), min(kept, micro_batches))
    return fixed + micro_batches * each


@lean_kernel
def fill_rooms(holds: Holds, split: bool, capacity: int, rooms: Integers) -> None:
    """By the stages to the end (up to as many as there is room for), start and stop, `most_micro_batches`."""
    for to_end in range(1, len(rooms)):
        for start in range(rooms.shape[1]):
            for stop in range(rooms.shape[1]):
                if stop <= start:
                    rooms[to_end, start, stop] = -1
                    continue
                fixed, each = _need(holds, split, start, stop, to_end, to_end)
                spare = capacity - fixed
                # Where messages are empty, any number fits or none.
                if each > 0:
                    rooms[to_end, start, stop] = spare // each
                else:
                    rooms[to_end, start, stop] = ANY if spare >= 0 else -1


@lean_kernel
def fill_limits(
    holds: Holds, split: bool, stops: Integers, capacities: Integers, micro_batches: int, limits: Integers
) -> None:
    """What is in flight, and kept, at the most, by stage: the first of the wishes that fits its worker.

    Negative capacities are not checked.
    """
    depth = len(stops)
    start = 0
    for position in range(depth):
        stop, base, capacity = stops[position], depth - position, capacities[position]
        extra, lower = depth, depth
        while True:
            if extra >= 0:
                in_flight, kept = base + extra, (depth if split else base) + extra
            else:
                lower -= 1
                in_flight, kept = base, lower
                if not split or lower <= base:
                    in_flight, kept = base, base
                    break
            if capacity < 0:
                break
            fixed, each = _need(holds, split, start, stop, min(in_flight, micro_batches), min(kept, micro_batches))
            if fixed + micro_batches * each <= capacity:
                break
            extra -= 1
        limits[0, position], limits[1, position] = in_flight, kept
        start = stop


@lean_kernel
def fill_held_back(holds: Holds, capacity: int, counts: Integers, forwards: Integers, weight_grads: Integers) -> None:
    """By micro-batches, start and stop: the most F that can be run until the first gradient comes back, and the least W
    that have been run when the last I has ended.
    """
    size = len(holds.fixed)
    for start in range(size):
        for stop in range(start + 1, size):
            spare = capacity - holds.fixed[start, stop]
            most = _how_many(spare, holds.activations[start, stop] + holds.output[start, stop])
            # The I of a first hop lets go of nothing.
            each = holds.weight_grads[start, stop] if start > 0 else holds.activations[start, stop]
            for place in range(len(counts)):
                count = counts[place]
                waiting = _how_many(spare - count * holds.both[start, stop], each)
                forwards[place, start, stop] = min(count, most)
                weight_grads[place, start, stop] = max(0, count - waiting)


@lean_part
def _how_many(spare: int, each: int) -> int:
    """How often `each` goes into `spare`, at least once; any number of times where it is nothing."""
    return max(spare // each, 1) if each > 0 else ANY


@lean_part
def _need(holds: Holds, split: bool, start: int, stop: int, most: int, kept: int) -> tuple[int, int]:
    """Bytes of a stage, and besides for every micro-batch, with so many in flight, and kept, or more."""
    if split:
        return _split_need(holds, start, stop, most, kept)
    return _fused_need(holds, start, stop, most)


@lean_part
def _fused_need(holds: Holds, start: int, stop: int, most: int) -> tuple[int, int]:
    output, both = holds.output[start, stop], holds.both[start, stop]
    each = holds.activations[start, stop] + output
    # Until the next operation begins, a B's gradient is still there.
    after = most - 1
    worst = -ANY
    for live in (1, min(most, _AHEAD), most):
        held = (live - 1) * each + holds.backward[start, stop]
        worst = max(worst, held - live * both + min(live, _AHEAD) * output)
    for live in (min(after, _AHEAD), after):
        if live:
            worst = max(worst, live * each + output - live * both + min(live, _AHEAD) * output)
    return holds.fixed[start, stop] + worst, both


@lean_part
def _split_need(holds: Holds, start: int, stop: int, most: int, kept: int) -> tuple[int, int]:
    fixed, output, both = holds.fixed[start, stop], holds.output[start, stop], holds.both[start, stop]
    each, held, working = (
        holds.activations[start, stop] + output,
        holds.weight_grads[start, stop],
        holds.working[start, stop],
    )
    # The I of a first hop computes nothing and lets go of nothing; its W is a B.
    if start == 0:
        return fixed + (kept - 1) * each + holds.backward[start, stop], output
    worst = kept * held + working
    for live in (1, min(most, _AHEAD), most):
        others = (live - 1) * each + (kept - live) * held - live * both
        in_input_grad = holds.input_grad[start, stop] + min(live - 1, _AHEAD - 1) * output
        in_others = max(holds.forward[start, stop], each + working) + min(live, _AHEAD) * output
        worst = max(worst, others + max(in_input_grad, in_others))
    return fixed + worst, both
