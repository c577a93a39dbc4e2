"""Lower bounds on the time of pipelines, from the last stage to the first; `pipelines.bounds` has the formulas."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from chameleon_ft.schedule.jit import no_refcount_inline, no_refcount_kernel
from chameleon_ft.schedule.records import Floats, Integers
from chameleon_ft.search._kernels.records import Bounds, Pipeline, Tables

# Rules of `greedy_cut`: of the layers where a stage may stop the nearest to the wanted one, the last, or the first.
NEAREST: Final = 0
LATEST: Final = 1
EARLIEST: Final = 2


class Stage(NamedTuple):
    """A stage of a pipeline to be timed.

    Attributes:
        kind: class of its worker.
        start, stop: its layers.
        micro_batches: micro-batches of its pipeline.
        to_end: stages from it to the last, itself included; no more than micro-batches.
        first_s, rest_s: until the gradient of one micro-batch, and of all, is back from the stages after it.
    """

    kind: int
    start: int
    stop: int
    micro_batches: int
    to_end: int
    first_s: float
    rest_s: float


class Times(NamedTuple):
    """Seconds of a stage and those after it: `Bounds` for one stage, without gradient sync."""

    first_s: float
    returned_s: float
    ended_s: float


_ANY: Final = Times(math.inf, math.inf, math.inf)


@no_refcount_kernel
def fill_bounds(
    tables: Tables, kind: int, following: int, micro_batches: int, limit_s: float, sync_s: Floats, bounds: Bounds
) -> None:
    """Fill in the bounds of one stage after the other, on workers of one class, each in front of those before it.

    Stages with which the step would take longer than `limit_s` are left out.

    Args:
        tables: stages of all classes.
        kind: class of these workers.
        following: stages that follow all of them.
        micro_batches: micro-batches of the pipeline.
        limit_s: seconds that the step may take.
        sync_s: seconds of gradient sync by start and stop, float64 [L + 1, L + 1].
        bounds: by number of stages, float64 [stages + 1, L + 1]. Row 0, of the stages that follow, is given; the other
            rows are filled in.
    """
    size = sync_s.shape[0]
    for row in range(1, bounds.returned_s.shape[0]):
        to_end = min(following + row, micro_batches)
        for start in range(size):
            # The least over all layers where the stage may stop, each of the three times for itself.
            min_first_s = min_s = min_end_s = math.inf
            for stop in range(start + 1, size):
                forward_s = tables.forward_s[kind, start, stop]
                work_s = forward_s + tables.backward_s[kind, start, stop]
                all_s = work_s + tables.weight_s[kind, start, stop]
                # With more layers it takes longer still.
                if work_s >= min_first_s and micro_batches * work_s >= min_s and micro_batches * all_s >= min_end_s:
                    break
                rest_s = bounds.returned_s[row - 1, stop]
                if rest_s == math.inf:
                    continue
                stage = Stage(kind, start, stop, micro_batches, to_end, bounds.first_s[row - 1, stop], rest_s)
                enough = Times(min_first_s, min_s, min_end_s - sync_s[start, stop])
                limit = _limit(tables, limit_s, tables.forward_before_s[start], start, sync_s[start, stop])
                found, _ = _stage_s(tables, stage, enough, limit)
                down_s = forward_s + tables.message_s[stop] + bounds.ended_s[row - 1, stop]
                min_first_s, min_s = min(min_first_s, found.first_s), min(min_s, found.returned_s)
                min_end_s = min(min_end_s, max(found.ended_s + sync_s[start, stop], down_s))
            bounds.first_s[row, start] = min_first_s
            bounds.returned_s[row, start] = min_s
            bounds.ended_s[row, start] = min_end_s


@no_refcount_inline
def _limit(tables: Tables, limit_s: float, before_s: float, start: int, sync_s: float) -> Times:
    """Return the seconds that a stage from layer `start` on may take if its first activation arrives at `before_s`."""
    return Times(math.inf, limit_s - before_s - tables.backward_before_s[start], limit_s - before_s - sync_s)


@no_refcount_inline
def _stage_s(tables: Tables, stage: Stage, enough: Times, limit: Times) -> tuple[Times, int]:
    """Return the least times of a stage, each for itself, over its options within a limit; and one of these options.

    That is the option that recomputes least, or without a limit the one that ends first. The times are infinite and the
    option is negative if there is none. Options that improve on none of the times that are `enough` are left out.
    """
    first_s = returned_s = ended_s = math.inf
    best = -1
    begin = tables.first[stage.kind, stage.start, stage.stop]
    end = tables.first[stage.kind, stage.start, stage.stop + 1]
    for option in range(begin, end):
        if option + 1 < end and tables.options[option].in_flight < tables.in_flight_share * stage.to_end:
            continue
        least = _unlimited_s(tables, stage, option)
        # Each further option recomputes more.
        if (
            (best >= 0 or least.first_s >= enough.first_s)
            and least.returned_s >= min(returned_s, enough.returned_s)
            and least.ended_s >= min(ended_s, enough.ended_s)
        ):
            break
        own = _option_s(tables, stage, option)
        if own.returned_s <= limit.returned_s and own.ended_s <= limit.ended_s:
            if best < 0 or (limit.returned_s == math.inf and own.ended_s < ended_s):
                best = option
            first_s, returned_s = min(first_s, own.first_s), min(returned_s, own.returned_s)
            ended_s = min(ended_s, own.ended_s)
    return Times(first_s, returned_s, ended_s), best


@no_refcount_inline
def _seconds(tables: Tables, stage: Stage, option: int) -> tuple[float, float, float]:
    """Return the seconds of F, of B or I, and of W, recomputation included."""
    at = stage.kind, stage.start, stage.stop
    forward, backward, weight = tables.forward_s[at], tables.backward_s[at], tables.weight_s[at]
    # A first hop has no input gradient to make: its W is the backward in one go.
    if tables.split and stage.start == 0:
        return forward, backward, weight + tables.options[option].recompute_s
    return forward, backward + tables.options[option].recompute_s, weight


@no_refcount_inline
def _unlimited_s(tables: Tables, stage: Stage, option: int) -> Times:
    """Return the times of a stage with an option, if memory held all micro-batches at once."""
    forward, backward, weight = _seconds(tables, stage, option)
    through_s = forward + 2 * tables.message_s[stage.stop] + backward
    own_s = max(stage.micro_batches * (forward + backward), through_s + stage.rest_s)
    return Times(
        through_s + stage.first_s, own_s, max(stage.micro_batches * (forward + backward + weight), own_s + weight)
    )


@no_refcount_inline
def _option_s(tables: Tables, stage: Stage, option: int) -> Times:
    """Return the times of a stage with an option."""
    once_s, own_s, done_s = _unlimited_s(tables, stage, option)
    forward, backward, weight = _seconds(tables, stage, option)
    count, memory = stage.micro_batches, tables.options[option]
    whole_in_weight = tables.split and stage.start == 0
    # Until the first gradient is back, the stage runs no more forwards than there is room for.
    room = min(memory.in_flight, count)
    idle_s = max(0.0, once_s - backward - room * forward)
    waited = max(0, count - memory.deferred)
    # Micro-batches go through in so many rounds at least: when one begins, all but room - 1 of those before are back.
    rounds = (count + room - 1) // room
    rest = count - rounds - (rounds - 1) * (room - 1)
    taken_s = rounds * (once_s + (weight if whole_in_weight else 0.0)) + rest * tables.gradient_interval_s
    # Every micro-batch takes bytes of memory while it is away; while an operation runs, all others have only what that
    # leaves. Where that is nothing, micro-batches have no bytes either.
    away_s, spare = once_s - forward - backward, max(1, memory.spare)
    byte_s = away_s * memory.each + forward * memory.forward + backward * memory.backward
    own_byte_s, byte_s = count * byte_s / spare, count * (byte_s + weight * memory.weight) / spare
    done_s = max(done_s, count * (forward + backward + weight) + idle_s, byte_s)
    own_s = max(own_s, count * (forward + backward) + waited * weight + idle_s)
    if whole_in_weight:
        return Times(once_s, own_s, max(done_s, own_s + weight, taken_s))
    own_s = max(own_s, taken_s, own_byte_s)
    return Times(once_s, own_s, max(done_s, own_s + weight))


@no_refcount_kernel
def cut_s(
    tables: Tables,
    shape: Integers,
    cut_points: Integers,
    micro_batches: int,
    limit_s: float,
    sync_s: Floats,
    options: Integers,
) -> float:
    """Return the seconds that no order of operations beats on this cut; infinite where a stage does not fit.

    Args:
        tables: stages of all classes.
        shape, cut_points: class of each worker and end of each stage, int64 [stages].
        micro_batches: micro-batches of the pipeline.
        limit_s: seconds that the step may take where options are chosen.
        sync_s: seconds of gradient sync by start and stop, float64 [L + 1, L + 1].
        options: the option of each stage, int64 [stages]. A negative one is replaced by the option within
            the limit that recomputes least, or without a limit by the one that ends first.
    """
    first_s = returned_s = ended_s = 0.0
    for position in range(len(shape) - 1, -1, -1):
        start = cut_points[position - 1] if position else 0
        to_end = min(len(shape) - position, micro_batches)
        stage = Stage(shape[position], start, cut_points[position], micro_batches, to_end, first_s, returned_s)
        sync = sync_s[start, stage.stop]
        if options[position] < 0:
            limit = _limit(tables, limit_s, tables.forward_before_s[start], start, sync)
            _, options[position] = _stage_s(tables, stage, _ANY, limit)
            if options[position] < 0:
                return math.inf
        own = _option_s(tables, stage, options[position])
        down_s = tables.forward_s[stage.kind, start, stage.stop] + tables.message_s[stage.stop]
        first_s, returned_s, ended_s = own.first_s, own.returned_s, max(own.ended_s + sync, down_s + ended_s)
    return ended_s


def _fill_allowed(
    tables: Tables, pipeline: Pipeline, position: int, start: int, before_s: float, after_s: float, allowed: Integers
) -> int:
    """Fill in where a stage may stop so that the bound on all that is decided is within the limit; return how many.

    Args:
        tables: stages of all classes.
        pipeline: the pipeline that is cut.
        position, start: place of the stage in the pipeline, and its first layer.
        before_s: seconds until its first activation arrives.
        after_s: seconds from when its last gradient has gone out until all workers before it have ended.
        allowed: layers after the last one of the stage, ascending; int64 [L], filled in.
    """
    kind, count, found = pipeline.shape[position], pipeline.micro_batches, 0
    to_end = min(len(pipeline.shape) - position, count)
    left_s = pipeline.limit_s - before_s
    for stop in range(start + 1, pipeline.sync_s.shape[0]):
        rest_s = pipeline.after.returned_s[position, stop]
        if rest_s == math.inf:
            continue
        sync_s = pipeline.sync_s[start, stop]
        stage = Stage(kind, start, stop, count, to_end, pipeline.after.first_s[position, stop], rest_s)
        own, _ = _stage_s(tables, stage, _ANY, _limit(tables, pipeline.limit_s, before_s, start, sync_s))
        down_s = tables.forward_s[kind, start, stop] + tables.message_s[stop] + pipeline.after.ended_s[position, stop]
        done_s = max(own.ended_s + sync_s, down_s, own.returned_s + after_s)
        if done_s < math.inf and done_s <= left_s:
            allowed[found] = stop
            found += 1
    return found


def _next_stage(
    tables: Tables, pipeline: Pipeline, position: int, start: int, stop: int, before_s: float, after_s: float
) -> tuple[float, float]:
    """Return `before_s` and `after_s` of the stage after this one, see `fill_allowed`."""
    kind = pipeline.shape[position]
    message_s = tables.message_s[stop]
    done_s = max(tables.weight_s[kind, start, stop] + pipeline.sync_s[start, stop], after_s)
    return (
        before_s + (tables.forward_s[kind, start, stop] + message_s),
        message_s + tables.backward_s[kind, start, stop] + done_s,
    )


fill_allowed, _inline_fill_allowed = no_refcount_kernel(_fill_allowed), no_refcount_inline(_fill_allowed)
next_stage, _inline_next_stage = no_refcount_kernel(_next_stage), no_refcount_inline(_next_stage)


@no_refcount_kernel
def greedy_cut(
    tables: Tables,
    pipeline: Pipeline,
    speeds: Floats,
    wanted: Floats,
    rule: int,
    allowed: Integers,
    cut_points: Integers,
) -> bool:
    """Fill in the cut that one rule makes, stage by stage; return False if it leads to a dead end.

    Args:
        tables, pipeline: as for `fill_allowed`.
        speeds: speed of each class, float64 [C].
        wanted: where stages are to stop, float64 [stages]; empty for where they would stop if all layers that are left
            were shared out evenly.
        rule: `NEAREST`, `LATEST` or `EARLIEST`.
        allowed: int64 [L], to work in.
        cut_points: int64 [stages], filled in.
    """
    start = 0
    before_s = after_s = 0.0
    for position in range(len(pipeline.shape)):
        count = _inline_fill_allowed(tables, pipeline, position, start, before_s, after_s, allowed)
        if not count:
            return False
        stop = allowed[count - 1] if rule == LATEST else allowed[0]
        if rule == NEAREST:
            aim = wanted[position] if len(wanted) else _even_stop(tables, pipeline.shape[position:], speeds, start)
            for place in range(1, count):
                if abs(allowed[place] - aim) <= abs(stop - aim):
                    stop = allowed[place]
        before_s, after_s = _inline_next_stage(tables, pipeline, position, start, stop, before_s, after_s)
        cut_points[position] = start = stop
    return True


@no_refcount_inline
def _even_stop(tables: Tables, shape: Integers, speeds: Floats, start: int) -> float:
    """Return where the first of the stages left would stop, in layers and parts, if all had equal work for their speed.

    `shape` has the class of each worker of the stages left, int64 [stages], and `start` is the first layer left.
    """
    last = tables.message_s.shape[0] - 1
    if len(shape) == 1:
        return float(last)
    kind = shape[0]
    speed = 0.0
    for each in shape:
        speed += speeds[each]
    wanted_s = speeds[kind] / speed * _stage_work_s(tables, kind, start, last)
    stop = start + 1
    below_s = 0.0
    while stop < last and _stage_work_s(tables, kind, start, stop) < wanted_s:
        below_s = _stage_work_s(tables, kind, start, stop)
        stop += 1
    work_s = _stage_work_s(tables, kind, start, stop)
    part = (wanted_s - below_s) / (work_s - below_s) if work_s > below_s else 1.0
    return stop - 1 + part


@no_refcount_inline
def _stage_work_s(tables: Tables, kind: int, start: int, stop: int) -> float:
    """Return the seconds that a stage computes for one micro-batch, without recomputation."""
    work_s: float = tables.forward_s[kind, start, stop] + tables.backward_s[kind, start, stop]
    work_s += tables.weight_s[kind, start, stop]
    return work_s
