"""The inner loops of `search._bounds` and `search._cuts`, compiled by numba: matrices are by start and stop of a stage.

Nothing here makes an array that holds more than the time of a best cut: to ask once more for one stage is faster than
to keep what all stages take.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Booleans, Floats, Integers

# As in `Choice`.
_NEAREST: Final = 0
_LATEST: Final = 1


class Times(NamedTuple):
    """What stages take, by kind of worker: those of `StageTimes`.

    Attributes:
        forward_s, backward_s, weight_s: of F, of B or I, and of W.
        message_s: by the layer where a stage stops.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    message_s: Floats


class Held(NamedTuple):
    """What memory does to stages, by kind of worker.

    Attributes:
        matters: whether memory is known.
        rooms: `StageMemory.rooms`.
        forwards, weight_grads: of `HeldBack`, by micro-batches of a window.
    """

    matters: Booleans
    rooms: Integers
    forwards: Integers
    weight_grads: Integers


@lean_kernel
def fill_bounds(
    times: Times,
    held: Held,
    kind: int,
    before: int,
    counts: Integers,
    sync_s: Floats,
    first_s: Floats,
    after_s: Floats,
    end_s: Floats,
    returned_s: Floats,
    ended_s: Floats,
) -> None:
    """Times of stages in front of others, one after the other, all on workers of one kind.

    Args:
        times, held: of all kinds.
        kind: of these.
        before: how many stages follow them.
        counts: numbers of micro-batches, those of a window.
        sync_s: of the gradients of a stage.
        first_s: by stage to be added and start, `returned_s` of those after it for one micro-batch.
        after_s, end_s: `returned_s` and `ended_s` of the stages that follow, by micro-batches and start.
        returned_s, ended_s: the same of each stage that is added with all that follow it, to be filled in.
    """
    size = len(sync_s)
    for stage in range(len(returned_s)):
        for place in range(len(counts)):
            rest_s = returned_s[stage - 1, place] if stage else after_s[place]
            rest_end_s = ended_s[stage - 1, place] if stage else end_s[place]
            for start in range(size):
                least_s = least_end_s = math.inf
                for stop in range(start + 1, size):
                    forward, both = times.forward_s[kind, start, stop], times.backward_s[kind, start, stop]
                    both += forward
                    weight, message_s = times.weight_s[kind, start, stop], times.message_s[kind, stop]
                    count = counts[place]
                    # With more layers it takes longer still.
                    if count * both >= least_s and count * (both + weight) >= least_end_s:
                        break
                    if not has_room(held, kind, before + stage + 1, count, start, stop):
                        continue
                    own_s, done_s = _stage_s(
                        times, held, kind, place, count, start, stop, first_s[stage, stop], rest_s[stop]
                    )
                    least_s = min(least_s, own_s)
                    done_s = max(done_s + sync_s[start, stop], forward + message_s + rest_end_s[stop])
                    least_end_s = min(least_end_s, done_s)
                returned_s[stage, place, start], ended_s[stage, place, start] = least_s, least_end_s


@lean_part
def has_room(held: Held, kind: int, to_end: int, count: int, start: int, stop: int) -> bool:
    """Whether a stage fits with as many micro-batches as 1F1B has in flight there."""
    if not held.matters[kind]:
        return True
    fits: bool = count <= held.rooms[kind, min(to_end, count), start, stop]
    return fits


@lean_part
def _stage_s(
    times: Times,
    held: Held,
    kind: int,
    place: int,
    count: int,
    start: int,
    stop: int,
    first_s: float,
    rest_s: float,
) -> tuple[float, float]:
    """Until the last gradient of a stage has gone out, and until its worker has computed everything.

    Args:
        first_s, rest_s: until the gradient of one micro-batch, and of all, comes back to the worker after it.
    """
    forward, backward = times.forward_s[kind, start, stop], times.backward_s[kind, start, stop]
    weight, messages_s = times.weight_s[kind, start, stop], 2 * times.message_s[kind, stop]
    own_s, work_s = count * (forward + backward), count * (forward + backward + weight)
    if held.matters[kind]:
        back_s = forward + messages_s + first_s
        idle_s = max(0.0, back_s - held.forwards[kind, place, start, stop] * forward)
        own_s += idle_s + held.weight_grads[kind, place, start, stop] * weight
        work_s += idle_s
    own_s = max(own_s, forward + backward + messages_s + rest_s)
    return own_s, max(work_s, own_s + weight)


@lean_kernel
def cut_s(times: Times, held: Held, shape: Integers, stops: Integers, place: int, count: int, sync_s: Floats) -> float:
    """Seconds below which no order of operations can be on this cut, if it fits."""
    first_s = returned_s = ended_s = 0.0
    for position in range(len(shape) - 1, -1, -1):
        kind, stop = shape[position], stops[position]
        start = stops[position - 1] if position else 0
        forward, message_s = times.forward_s[kind, start, stop], times.message_s[kind, stop]
        own_s, done_s = _stage_s(times, held, kind, place, count, start, stop, first_s, returned_s)
        first_s += forward + times.backward_s[kind, start, stop] + 2 * message_s
        ended_s = max(done_s + sync_s[start, stop], forward + message_s + ended_s)
        returned_s = own_s
    return ended_s


class Wanted(NamedTuple):
    """Which cuts are looked for.

    Attributes:
        shape: kinds of the workers.
        place, micro_batches: their number, and the place in its window.
        sync_s: of the gradients of a stage.
        first_s, returned_s, ended_s: by stage and layer, of the stages after it: for one micro-batch, and for all.
    """

    shape: Integers
    place: int
    micro_batches: int
    sync_s: Floats
    first_s: Floats
    returned_s: Floats
    ended_s: Floats


@lean_kernel
def fill_allowed(
    times: Times,
    held: Held,
    wanted: Wanted,
    limit_s: float,
    position: int,
    start: int,
    before_s: float,
    after_s: float,
    allowed: Integers,
) -> int:
    """Where a stage may stop so that the bound on what is decided is within the limit; returns how many there are.

    Args:
        limit_s: see above.
        position, start: of the stage.
        before_s: until its first activation comes in.
        after_s: from when its last gradient has gone out, until all workers before it are done.
        allowed: to be filled in.
    """
    return _allowed(times, held, wanted, limit_s, position, start, before_s, after_s, allowed)


@lean_kernel
def greedy_cut(
    times: Times,
    held: Held,
    wanted: Wanted,
    limit_s: float,
    speeds: Floats,
    wishes: Floats,
    choice: int,
    allowed: Integers,
    stops: Integers,
) -> bool:
    """Fill in the cut of a choice at every stage; returns whether that leads anywhere.

    Args:
        limit_s: what the bound may be.
        speeds: of kinds.
        wishes: where stages are wished to stop; none for where they would, if all layers left were shared out evenly.
        choice: `Choice`.
        allowed: room to work in.
        stops: to be filled in.
    """
    start = 0
    before_s = after_s = 0.0
    for position in range(len(wanted.shape)):
        count = _allowed(times, held, wanted, limit_s, position, start, before_s, after_s, allowed)
        if not count:
            return False
        stop = allowed[count - 1] if choice == _LATEST else allowed[0]
        if choice == _NEAREST:
            wish = wishes[position] if len(wishes) else _even_s(times, wanted, speeds, position, start)
            for place in range(1, count):
                if abs(allowed[place] - wish) <= abs(stop - wish):
                    stop = allowed[place]
        kind = wanted.shape[position]
        message_s = times.message_s[kind, stop]
        done_s = max(times.weight_s[kind, start, stop] + wanted.sync_s[start, stop], after_s)
        before_s, after_s = (
            before_s + (times.forward_s[kind, start, stop] + message_s),
            message_s + times.backward_s[kind, start, stop] + done_s,
        )
        stops[position] = start = stop
    return True


@lean_part
def _allowed(
    times: Times,
    held: Held,
    wanted: Wanted,
    limit_s: float,
    position: int,
    start: int,
    before_s: float,
    after_s: float,
    allowed: Integers,
) -> int:
    kind, to_end = wanted.shape[position], len(wanted.shape) - position
    count, found = wanted.micro_batches, 0
    for stop in range(start + 1, len(wanted.sync_s)):
        if not has_room(held, kind, to_end, count, start, stop):
            continue
        forward, backward = times.forward_s[kind, start, stop], times.backward_s[kind, start, stop]
        message_s, rest_s = times.message_s[kind, stop], wanted.returned_s[position, stop]
        _, latest_s = _stage_s(
            times, held, kind, wanted.place, count, start, stop, wanted.first_s[position, stop], rest_s
        )
        latest_s = max(latest_s + wanted.sync_s[start, stop], forward + message_s + wanted.ended_s[position, stop])
        own_s = max(count * (forward + backward), forward + backward + 2 * message_s + rest_s)
        latest_s = max(latest_s, own_s + after_s)
        if latest_s < math.inf and latest_s <= limit_s - before_s:
            allowed[found] = stop
            found += 1
    return found


@lean_part
def _even_s(times: Times, wanted: Wanted, speeds: Floats, position: int, start: int) -> float:
    """Where a stage would stop, in layers and parts, if all left had equal work for their speed."""
    last = len(wanted.sync_s) - 1
    if position == len(wanted.shape) - 1:
        return float(last)
    kind = wanted.shape[position]
    speed = 0.0
    for rest in wanted.shape[position:]:
        speed += speeds[rest]
    wanted_s = speeds[kind] / speed * stage_work_s(times, kind, start, last)
    stop = start + 1
    below_s = 0.0
    while stop < last and stage_work_s(times, kind, start, stop) < wanted_s:
        below_s = stage_work_s(times, kind, start, stop)
        stop += 1
    work_s = stage_work_s(times, kind, start, stop)
    part = (wanted_s - below_s) / (work_s - below_s) if work_s > below_s else 1.0
    return stop - 1 + part


@lean_part
def stage_work_s(times: Times, kind: int, start: int, stop: int) -> float:
    work_s: float = times.forward_s[kind, start, stop] + times.backward_s[kind, start, stop]
    work_s += times.weight_s[kind, start, stop]
    return work_s
