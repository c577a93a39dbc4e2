"""Lower bounds on the time of pipelines, from the last stage to the first; `search.bounds` has the formulas."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._records import Floats, Integers
from chameleon_ft.search._kernels.stage_memory import BACKWARD, DEFERRED, EACH, FORWARD, IN_FLIGHT, SPARE, WEIGHT

# As in `search.cuts.Choice`.
_NEAREST: Final = 0
_LATEST: Final = 1


class Tables(NamedTuple):
    """Stages of a model of L layers on each of C classes of workers.

    Attributes:
        forward_s, backward_s, weight_s: seconds of F, of B or I, and of W (zero with fused backward), without
            recomputation; float64 [C, L + 1, L + 1], by class, start and stop.
        message_s: seconds of the message over the boundary before a layer, float64 [L + 1].
        before_s, behind_s: seconds of F, and of B or I, of all layers before a layer, at least; float64 [L + 1].
        first: the place of the stage's first option, int64 [C, L + 1, L + 2]; those of stop end where stop + 1 begins.
        options: as in `stage_memory`, int64 [options, columns].
        again_s: seconds of recomputation by option, float64 [options].
        apart_s: seconds between two gradients that leave a last stage, at least.
        split: whether backward is split in two.
        roomy: the share of the micro-batches that 1F1B has in flight on a stage that the stage has to have room for,
            or for as many as it can have if that is fewer. With 0 times are bounds, else they are estimates.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    message_s: Floats
    before_s: Floats
    behind_s: Floats
    first: Integers
    options: Integers
    again_s: Floats
    apart_s: float
    split: bool
    roomy: float


class Pipeline(NamedTuple):
    """A pipeline to be cut, and bounds on the stages after each of its stages.

    Attributes:
        shape: class of each worker, int64 [stages].
        micro_batches: of the pipeline.
        sync_s: seconds of gradient sync by start and stop, float64 [L + 1, L + 1].
        first_s, returned_s, ended_s: as for `fill_bounds`, by stage, of the stages after it; float64 [stages, L + 1].
    """

    shape: Integers
    micro_batches: int
    sync_s: Floats
    first_s: Floats
    returned_s: Floats
    ended_s: Floats


@lean_kernel
def fill_bounds(
    tables: Tables,
    kind: int,
    behind: int,
    count: int,
    limit_s: float,
    sync_s: Floats,
    first_s: Floats,
    returned_s: Floats,
    ended_s: Floats,
) -> None:
    """Fill in the bounds of one stage after the other, on workers of one class, each in front of those before it.

    Stages with which the step would take longer than `limit_s` are left out.

    Args:
        tables: of all classes.
        kind: class of these workers.
        behind: stages that follow all of them.
        count: micro-batches.
        limit_s: what the step may take.
        sync_s: seconds of gradient sync by start and stop, float64 [L + 1, L + 1].
        first_s: until the gradient of a single micro-batch has gone out again, by number of stages and first layer,
            float64 [stages + 1, L + 1]. Row 0, of the stages that follow, is given; the other rows are filled in.
        returned_s: until the last gradient of all micro-batches has gone out again; likewise.
        ended_s: until all workers have ended and have reduced their gradients; likewise.
    """
    size = sync_s.shape[0]
    for stage in range(1, returned_s.shape[0]):
        to_end = min(behind + stage, count)
        for start in range(size):
            least_first_s = least_s = least_end_s = math.inf
            for stop in range(start + 1, size):
                forward = tables.forward_s[kind, start, stop]
                work_s = forward + tables.backward_s[kind, start, stop]
                all_s = work_s + tables.weight_s[kind, start, stop]
                # With more layers it takes longer still.
                if work_s >= least_first_s and count * work_s >= least_s and count * all_s >= least_end_s:
                    break
                if returned_s[stage - 1, stop] == math.inf:
                    continue
                once_s, own_s, done_s, _ = _stage_s(
                    tables,
                    kind,
                    count,
                    to_end,
                    start,
                    stop,
                    first_s[stage - 1, stop],
                    returned_s[stage - 1, stop],
                    least_first_s,
                    least_s,
                    least_end_s - sync_s[start, stop],
                    limit_s - tables.before_s[start] - tables.behind_s[start],
                    limit_s - tables.before_s[start] - sync_s[start, stop],
                )
                done_s = max(done_s + sync_s[start, stop], forward + tables.message_s[stop] + ended_s[stage - 1, stop])
                least_first_s = min(least_first_s, once_s)
                least_s, least_end_s = min(least_s, own_s), min(least_end_s, done_s)
            first_s[stage, start], returned_s[stage, start], ended_s[stage, start] = least_first_s, least_s, least_end_s


@lean_part
def _stage_s(
    tables: Tables,
    kind: int,
    count: int,
    to_end: int,
    start: int,
    stop: int,
    first_s: float,
    rest_s: float,
    enough_first_s: float,
    enough_s: float,
    enough_end_s: float,
    limit_s: float,
    limit_end_s: float,
) -> tuple[float, float, float, int]:
    """For one stage the least `_unlimited_s` of one micro-batch, and the least `_option_s`, each for itself, over its
    options within the limits; and the option of them that recomputes least, or without limits the one that ends first.

    Infinite, and a negative option, where there is none. Options that are below none of the times that are enough are
    left out.
    """
    least_first_s = least_s = least_end_s = math.inf
    best = -1
    begin, end = tables.first[kind, start, stop], tables.first[kind, start, stop + 1]
    for option in range(begin, end):
        if option + 1 < end and tables.options[option, IN_FLIGHT] < tables.roomy * to_end:
            continue
        once_s, own_s, done_s = _unlimited_s(tables, kind, count, start, stop, option, first_s, rest_s)
        # Each further option recomputes more.
        is_first_known = best >= 0 or once_s >= enough_first_s
        if is_first_known and own_s >= min(least_s, enough_s) and done_s >= min(least_end_s, enough_end_s):
            break
        own_s, done_s = _option_s(tables, kind, count, start, stop, option, first_s, rest_s)
        if own_s <= limit_s and done_s <= limit_end_s:
            if best < 0 or (limit_s == math.inf and done_s < least_end_s):
                best = option
            least_first_s, least_s = min(least_first_s, once_s), min(least_s, own_s)
            least_end_s = min(least_end_s, done_s)
    return least_first_s, least_s, least_end_s, best


@lean_part
def _stage_option_s(tables: Tables, kind: int, start: int, stop: int, option: int) -> tuple[float, float, float]:
    """Seconds of F, of B or I, and of W."""
    again_s = tables.again_s[option]
    backward, weight = tables.backward_s[kind, start, stop], tables.weight_s[kind, start, stop]
    # A first hop has no input gradient to make: its W is the backward in one go.
    if tables.split and start == 0:
        return tables.forward_s[kind, start, stop], backward, weight + again_s
    return tables.forward_s[kind, start, stop], backward + again_s, weight


@lean_part
def _unlimited_s(
    tables: Tables, kind: int, count: int, start: int, stop: int, option: int, first_s: float, rest_s: float
) -> tuple[float, float, float]:
    """As `first_s` and `_option_s`, if memory held all micro-batches at once."""
    forward, backward, weight = _stage_option_s(tables, kind, start, stop, option)
    through_s = forward + 2 * tables.message_s[stop] + backward
    own_s = max(count * (forward + backward), through_s + rest_s)
    return through_s + first_s, own_s, max(count * (forward + backward + weight), own_s + weight)


@lean_part
def _option_s(
    tables: Tables, kind: int, count: int, start: int, stop: int, option: int, first_s: float, rest_s: float
) -> tuple[float, float]:
    """Seconds until the last gradient of all micro-batches has gone out, and until the worker has ended.

    Args:
        option: of the stage.
        first_s, rest_s: until the gradient of one micro-batch, and of all, is back from the stages after it.
    """
    once_s, own_s, done_s = _unlimited_s(tables, kind, count, start, stop, option, first_s, rest_s)
    forward, backward, weight = _stage_option_s(tables, kind, start, stop, option)
    whole_in_weight = tables.split and start == 0
    bytes_of = tables.options[option]
    room = min(bytes_of[IN_FLIGHT], count)
    idle_s = max(0.0, once_s - backward - room * forward)
    waited = max(0, count - bytes_of[DEFERRED])
    # Every micro-batch takes one of so many places from its F until its backward, and bytes of memory while it is away;
    # while an operation runs, all others have only what that leaves. Where that is nothing, micro-batches have no bytes
    # either.
    away_s, spare = once_s - forward - backward, max(1, bytes_of[SPARE])
    byte_s = away_s * bytes_of[EACH] + forward * bytes_of[FORWARD] + backward * bytes_of[BACKWARD]
    # Micro-batches go through in so many rounds at least: when one begins, all but room - 1 of those before are back.
    rounds = (count + room - 1) // room
    rest = count - rounds - (rounds - 1) * (room - 1)
    taken_s = rounds * (once_s + (weight if whole_in_weight else 0.0)) + rest * tables.apart_s
    own_byte_s, byte_s = count * byte_s / spare, count * (byte_s + weight * bytes_of[WEIGHT]) / spare
    done_s = max(done_s, count * (forward + backward + weight) + idle_s, byte_s)
    own_s = max(own_s, count * (forward + backward) + waited * weight + idle_s)
    if whole_in_weight:
        return own_s, max(done_s, own_s + weight, taken_s)
    own_s = max(own_s, taken_s, own_byte_s)
    return own_s, max(done_s, own_s + weight)


@lean_kernel
def cut_s(
    tables: Tables,
    shape: Integers,
    stops: Integers,
    count: int,
    limit_s: float,
    sync_s: Floats,
    options: Integers,
) -> float:
    """Seconds that no order of operations beats on this cut; infinite where a stage does not fit.

    Args:
        tables: of all classes.
        shape, stops: class of each worker and end of each stage, int64 [stages].
        count: micro-batches.
        limit_s: what the step may take where options are chosen.
        sync_s: seconds of gradient sync by start and stop, float64 [L + 1, L + 1].
        options: the option of each stage, int64 [stages]. Negative ones are replaced by those that recompute least of
            the ones within the limit, or without a limit by those that end first.
    """
    first_s = returned_s = ended_s = 0.0
    for position in range(len(shape) - 1, -1, -1):
        kind, stop = shape[position], stops[position]
        start = stops[position - 1] if position else 0
        if options[position] < 0:
            to_end = min(len(shape) - position, count)
            limit_end_s = limit_s - tables.before_s[start]
            _, _, _, options[position] = _stage_s(
                tables,
                kind,
                count,
                to_end,
                start,
                stop,
                first_s,
                returned_s,
                math.inf,
                math.inf,
                math.inf,
                limit_end_s - tables.behind_s[start],
                limit_end_s - sync_s[start, stop],
            )
            if options[position] < 0:
                return math.inf
        at = kind, count, start, stop, options[position]
        once_s, _, _ = _unlimited_s(tables, *at, first_s, returned_s)
        own_s, done_s = _option_s(tables, *at, first_s, returned_s)
        down_s = tables.forward_s[kind, start, stop] + tables.message_s[stop]
        first_s, returned_s, ended_s = once_s, own_s, max(done_s + sync_s[start, stop], down_s + ended_s)
    return ended_s


@lean_kernel
def fill_allowed(
    tables: Tables,
    wanted: Pipeline,
    limit_s: float,
    position: int,
    start: int,
    before_s: float,
    after_s: float,
    allowed: Integers,
) -> int:
    """Fill in where a stage may stop so that the bound on all that is decided is within a limit; return how many.

    Args:
        tables: of all classes.
        wanted: what is cut.
        limit_s: what the bound may be.
        position, start: of the stage.
        before_s: until its first activation comes in.
        after_s: from when its last gradient has gone out, until all workers before it have ended.
        allowed: int64 [L], ascending.
    """
    return _allowed(tables, wanted, limit_s, position, start, before_s, after_s, allowed)


@lean_kernel
def greedy_cut(
    tables: Tables,
    wanted: Pipeline,
    limit_s: float,
    speeds: Floats,
    wishes: Floats,
    choice: int,
    allowed: Integers,
    stops: Integers,
) -> bool:
    """Fill in the cut of a choice at every stage; return whether there is one.

    Args:
        tables, wanted, limit_s: as for `fill_allowed`.
        speeds: of the classes, float64 [C].
        wishes: where stages are wished to stop, float64 [stages]; none for where they would if all layers that are left
            were shared out evenly.
        choice: `Choice`.
        allowed: int64 [L], to work in.
        stops: int64 [stages], filled in.
    """
    start = 0
    before_s = after_s = 0.0
    for position in range(len(wanted.shape)):
        count = _allowed(tables, wanted, limit_s, position, start, before_s, after_s, allowed)
        if not count:
            return False
        stop = allowed[count - 1] if choice == _LATEST else allowed[0]
        if choice == _NEAREST:
            wish = wishes[position] if len(wishes) else _even(tables, wanted, speeds, position, start)
            for place in range(1, count):
                if abs(allowed[place] - wish) <= abs(stop - wish):
                    stop = allowed[place]
        before_s, after_s = _passed(tables, wanted, position, start, stop, before_s, after_s)
        stops[position] = start = stop
    return True


@lean_kernel
def passed(
    tables: Tables, wanted: Pipeline, position: int, start: int, stop: int, before_s: float, after_s: float
) -> tuple[float, float]:
    """`before_s` and `after_s` of the stage after this one, see `fill_allowed`."""
    return _passed(tables, wanted, position, start, stop, before_s, after_s)


@lean_part
def _passed(
    tables: Tables, wanted: Pipeline, position: int, start: int, stop: int, before_s: float, after_s: float
) -> tuple[float, float]:
    """As `passed`, inlined."""
    kind = wanted.shape[position]
    message_s = tables.message_s[stop]
    done_s = max(tables.weight_s[kind, start, stop] + wanted.sync_s[start, stop], after_s)
    return (
        before_s + (tables.forward_s[kind, start, stop] + message_s),
        message_s + tables.backward_s[kind, start, stop] + done_s,
    )


@lean_part
def _allowed(
    tables: Tables,
    wanted: Pipeline,
    limit_s: float,
    position: int,
    start: int,
    before_s: float,
    after_s: float,
    allowed: Integers,
) -> int:
    """As `fill_allowed`, inlined."""
    kind, count, found = wanted.shape[position], wanted.micro_batches, 0
    to_end = min(len(wanted.shape) - position, count)
    for stop in range(start + 1, wanted.sync_s.shape[0]):
        rest_s = wanted.returned_s[position, stop]
        if rest_s == math.inf:
            continue
        _, own_s, done_s, _ = _stage_s(
            tables,
            kind,
            count,
            to_end,
            start,
            stop,
            wanted.first_s[position, stop],
            rest_s,
            math.inf,
            math.inf,
            math.inf,
            limit_s - before_s - tables.behind_s[start],
            limit_s - before_s - wanted.sync_s[start, stop],
        )
        down_s = tables.forward_s[kind, start, stop] + tables.message_s[stop]
        done_s = max(done_s + wanted.sync_s[start, stop], down_s + wanted.ended_s[position, stop], own_s + after_s)
        if done_s < math.inf and done_s <= limit_s - before_s:
            allowed[found] = stop
            found += 1
    return found


@lean_part
def _even(tables: Tables, wanted: Pipeline, speeds: Floats, position: int, start: int) -> float:
    """Where a stage would stop, in layers and parts, if all left had equal work for their speed."""
    last = wanted.sync_s.shape[0] - 1
    if position == len(wanted.shape) - 1:
        return float(last)
    kind = wanted.shape[position]
    speed = 0.0
    for rest in wanted.shape[position:]:
        speed += speeds[rest]
    wanted_s = speeds[kind] / speed * stage_work_s(tables, kind, start, last)
    stop = start + 1
    below_s = 0.0
    while stop < last and stage_work_s(tables, kind, start, stop) < wanted_s:
        below_s = stage_work_s(tables, kind, start, stop)
        stop += 1
    work_s = stage_work_s(tables, kind, start, stop)
    part = (wanted_s - below_s) / (work_s - below_s) if work_s > below_s else 1.0
    return stop - 1 + part


@lean_part
def stage_work_s(tables: Tables, kind: int, start: int, stop: int) -> float:
    """Seconds that a stage computes for one micro-batch, without recomputation."""
    work_s: float = tables.forward_s[kind, start, stop] + tables.backward_s[kind, start, stop]
    work_s += tables.weight_s[kind, start, stop]
    return work_s
