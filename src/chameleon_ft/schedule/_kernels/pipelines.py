"""The list scheduler for one pipeline whose stages are all on workers of their own: all rules in one go.

What `engine` and `replays` do for any routes, step by step the same: decisions in the order of time, and of workers
where they are at one time; channels of one message, of which one is full when another may be run ahead. With one stage
to a worker there is one queue of each kind, and the n-th forward is that of the n-th micro-batch, so counters stand for
lists. A worker for which nothing could be started looks again when the next tensor is there, or it is told that it may
send, and at no time between: then it would find the same. And the replay, where nobody is held back, is made along the
way: what an operation needs is decided before it.
"""

from __future__ import annotations

import math
from typing import Final

from chameleon_ft.schedule._kernels.jit import lean_kernel, lean_part
from chameleon_ft.schedule._kernels.pipeline_runs import Run
from chameleon_ft.schedule._records import Floats, Integers, Records

# As in `runs`.
_SLACK: Final = 1e-9
_ROUNDING: Final = 1e-9
# Of rules: they have led to a dead end, or it is not known whether they would.
_DEAD_END: Final = 1
_UNKNOWN: Final = 2
_DOWN: Final = 1
_UP: Final = 2


@lean_kernel
def try_rules(
    stages: Records,
    rules: Records,
    in_flight: Integers,
    kept: Integers,
    codes: Integers,
    ends_s: Floats,
    forward_at: Floats,
    backward_at: Floats,
    wake_s: Floats,
    queue: Integers,
    dead_ends: Integers,
    states: Records,
    micro_batches: int,
    split: bool,
    enough_s: float,
    slack: float,
    most: int,
    rough: bool,
) -> tuple[int, int, bool, float, bool, float]:
    """Try rules as `schedule._pipelines.tried` says.

    Args:
        stages, rules, in_flight, kept, micro_batches, split, enough_s, slack, most, rough: see there.
        codes, ends_s: room for what came of two of them.
        forward_at, backward_at, wake_s, states: of `Run`.
        queue: room for twice as many numbers as there are rules.
        dead_ends: zeros by rules.

    Returns:
        `Tried`, but for the place of its codes and ends in theirs.
    """
    count = len(rules)
    state = states[0]
    state.micro_batches, state.split = micro_batches, split
    state.per_stage = (3 if split else 2) * micro_batches
    enough_s = max(enough_s, _least_s(stages, micro_batches) * (1 + slack))
    for stage in range(len(stages)):
        own = stages[stage]
        state.slack_s = max(state.slack_s, _SLACK * own.forward_s, _SLACK * own.backward_s)
    best, place, best_s, best_beyond, best_only = -1, 0, math.inf, True, False
    done, end, spent, careful = 0, count, 0, False
    for number in range(count):
        queue[number] = number
    while done < end and spent < most:
        number = queue[done]
        own_rules = rules[number]
        state.gradients_only = done >= count or _comes_after(dead_ends, _DEAD_END, in_flight, number)
        state.forward_first, state.patience = own_rules.forward_first, own_rules.patience
        room = 1 - place if best >= 0 else 0
        run = Run(stages, forward_at, backward_at, ends_s[room], codes[room], wake_s, states)
        state.may_end = rough and not careful
        state.limit_s = best_s * (1 + _ROUNDING) if best >= 0 and not best_beyond else math.inf
        _begin(run, in_flight[number], kept[number])
        step_s = _go_on(run)
        if step_s < 0 and not state.gradients_only:
            # It is mostly met late, and then all begins again.
            spent += 1
            dead_ends[number] = _DEAD_END
            state.gradients_only = True
            _begin(run, in_flight[number], kept[number])
            step_s = _go_on(run)
        if step_s < 0:
            return -1, 0, False, 0.0, False, 0.0
        if step_s == math.inf and done < count and not dead_ends[number]:
            dead_ends[number] = _UNKNOWN
        # One that goes beyond limits is worse than any that does not.
        better = step_s < math.inf and (best < 0 or (best_beyond and not state.beyond_limits))
        better = better or (best_beyond == state.beyond_limits and step_s < best_s)
        strained = state.strained and not state.gradients_only
        if better and strained and _comes_after(dead_ends, _UNKNOWN, in_flight, number):
            # To know whether only gradients should have run ahead, all begins again, and every run goes to its end.
            best, place, best_s, best_beyond, best_only = -1, 0, math.inf, True, False
            done, end, spent, careful = 0, count, 0, True
            dead_ends[:] = 0
            continue
        done += 1
        spent += 1
        if (state.strained or state.beyond_limits) and not state.gradients_only:
            queue[end] = number
            end += 1
        if better:
            best, place, best_s = number, room, step_s
            best_beyond, best_only = state.beyond_limits, state.gradients_only
        if best_s <= enough_s and not best_beyond:
            break
        if done == end and best < 0:
            # Those that ended early may have come to be denied something as well.
            for other in range(count):
                if dead_ends[other] == _UNKNOWN:
                    dead_ends[other] = 0
                    queue[end] = other
                    end += 1
    return best, place, best_only, best_s, best_beyond, enough_s


@lean_part
def _comes_after(dead_ends: Integers, kind: int, in_flight: Integers, number: int) -> bool:
    """Whether rules that allow no more in flight have led to a dead end, or ended early."""
    for other in range(number):
        if dead_ends[other] == kind:
            stage = 0
            while stage < in_flight.shape[1] and in_flight[number, stage] >= in_flight[other, stage]:
                stage += 1
            if stage == in_flight.shape[1]:
                return True
    return False


@lean_part
def _least_s(stages: Records, micro_batches: int) -> float:
    """As `networks.least_step_s`."""
    before_s = bound_s = 0.0
    back_s = stages[0].weight_s
    for stage in range(len(stages)):
        own = stages[stage]
        busy_s = micro_batches * (own.forward_s + own.backward_s)
        bound_s = max(bound_s, before_s + busy_s + max(micro_batches * own.weight_s, back_s + own.up_s))
        before_s += own.forward_s + own.down_s
        back_s += own.backward_s + own.up_s
    return bound_s


@lean_part
def _begin(run: Run, in_flight: Integers, kept: Integers) -> None:
    state, count = run.state[0], run.state[0].micro_batches
    state.latest_s, state.denied, state.strained, state.beyond_limits = 0.0, 0, False, False
    for stage in range(len(run.stages)):
        own = run.stages[stage]
        own.room, own.kept = in_flight[stage], kept[stage]
        own.forwards = own.backwards = own.weights = own.sending = 0
        own.denied = own.awaits = False
        own.free = own.replayed_s = 0.0
        own.left_s = count * (own.forward_s + own.backward_s + own.weight_s)
        run.wake_s[stage] = 0.0
    for micro_batch in range(count):
        run.forward_at[micro_batch] = 0.0


@lean_part
def _go_on(run: Run) -> float:
    """Schedule; returns seconds of the replay, negative at a dead end."""
    state = run.state[0]
    remaining = len(run.codes)
    while remaining:
        stage, now = _first_awake(run)
        if stage >= 0:
            run.wake_s[stage] = math.inf
            # The last message of a worker may wait for the one before it to be received.
            if _held_back(run, stage):
                continue
        else:
            stage, now = _relax(run), state.latest_s
            if stage < 0:
                return -1.0
        end = _decide(run, stage, now)
        if end >= 0:
            remaining -= 1
            if _is_too_late(run, stage):
                return math.inf
            run.stages[stage].free = end
            run.wake_s[stage] = end
            state.latest_s = max(state.latest_s, end)
        else:
            run.wake_s[stage] = _next_there(run, stage, now + state.slack_s)
    step_s = 0.0
    for stage in range(len(run.stages)):
        step_s = max(step_s, run.stages[stage].replayed_s)
    return step_s


@lean_part
def _is_too_late(run: Run, stage: int) -> bool:
    """Whether the worker cannot be done early enough, even if it is never idle from now on."""
    state, own = run.state[0], run.stages[stage]
    # Where something was denied, only gradients are going to be run ahead, whatever comes of this run.
    if not state.may_end or state.strained or state.beyond_limits:
        return False
    late: bool = own.replayed_s + own.left_s > min(state.limit_s, own.limit_s)
    return late


@lean_part
def _first_awake(run: Run) -> tuple[int, float]:
    """The worker that is to look first, the lowest of several at one time, and when; -1 where all wait."""
    # Which one it is comes after when, for to find a minimum without its place takes no jumps.
    at_s = math.inf
    for stage in range(len(run.wake_s)):
        at_s = min(at_s, run.wake_s[stage])
    if at_s == math.inf:
        return -1, at_s
    first = 0
    while run.wake_s[first] > at_s:
        first += 1
    return first, at_s


@lean_part
def _next_there(run: Run, stage: int, horizon: float) -> float:
    """When the next tensor that a worker does not have yet will be there, as far as that is known."""
    forward_at, backward_at = _forward_at(run, stage), _backward_at(run, stage)
    at_s = forward_at if forward_at > horizon else math.inf
    return min(at_s, backward_at) if backward_at > horizon else at_s


@lean_part
def _wake(run: Run, stage: int, at_s: float) -> None:
    """One that is at work looks when it is done anyway."""
    at_s = max(at_s, run.stages[stage].free)
    run.wake_s[stage] = min(run.wake_s[stage], at_s)


@lean_part
def _arrives(run: Run, stage: int, at_s: float) -> None:
    """One that is busy until then looks at its queues anyway when it is free."""
    if run.stages[stage].free < at_s:
        run.wake_s[stage] = min(run.wake_s[stage], at_s)
        run.state[0].latest_s = max(run.state[0].latest_s, at_s)


@lean_part
def _decide(run: Run, stage: int, now: float) -> float:
    """Start the operation that the worker should run now, if there is one; returns its end, or -1."""
    state, own = run.state[0], run.stages[stage]
    horizon = now + state.slack_s
    pending = state.split and own.weights < own.backwards
    forward = False
    if own.room > 0 and state.forward_first:
        forward = _ready_forward(run, stage, horizon)
        if forward:
            if own.kept > 0:
                return _start_forward(run, stage, now)
            if pending:
                return _start_weight_grad(run, stage, now)
    if _ready_backward(run, stage, horizon):
        return _start_backward(run, stage, now)
    if own.room > 0 and not state.forward_first:
        forward = _ready_forward(run, stage, horizon)
        if forward and own.kept > 0:
            return _start_forward(run, stage, now)
    if pending and (forward or not _better_soon(run, stage, horizon)):
        return _start_weight_grad(run, stage, now)
    return -1.0


@lean_part
def _forward_at(run: Run, stage: int) -> float:
    """When the activation of its next forward is there; infinite where that is not known."""
    number, count = run.stages[stage].forwards, run.state[0].micro_batches
    if number == count or (stage > 0 and run.stages[stage - 1].forwards == number):
        return math.inf
    at_s: float = run.forward_at[stage * count + number]
    return at_s


@lean_part
def _backward_at(run: Run, stage: int) -> float:
    """When the gradient of its next backward is there; infinite where that is not known."""
    number, count = run.stages[stage].backwards, run.state[0].micro_batches
    last = stage == len(run.stages) - 1
    if number == (run.stages[stage].forwards if last else run.stages[stage + 1].backwards):
        return math.inf
    at_s: float = run.backward_at[stage * count + number]
    return at_s


@lean_part
def _ready_forward(run: Run, stage: int, horizon: float) -> bool:
    at_s = _forward_at(run, stage)
    # Whether it may be sent is asked last, for it is noted who may not.
    return at_s < math.inf and at_s <= horizon and _may_send_down(run, stage)


@lean_part
def _ready_backward(run: Run, stage: int, horizon: float) -> bool:
    return _backward_at(run, stage) <= horizon and _may_send_up(run, stage)


@lean_part
def _better_soon(run: Run, stage: int, horizon: float) -> bool:
    """Whether a tensor that the worker can use arrives before its next weight gradient is well under way."""
    own = run.stages[stage]
    until = horizon + run.state[0].patience * own.weight_s
    if own.room > 0 and own.kept > 0 and horizon < _forward_at(run, stage) < until:
        return True
    soon: bool = horizon < _backward_at(run, stage) < until
    return soon


@lean_part
def _start_forward(run: Run, stage: int, now: float) -> float:
    own, count = run.stages[stage], run.state[0].micro_batches
    number = own.forwards
    own.room -= 1
    own.kept -= 1
    code = number * len(run.stages) + stage
    _order(run, stage, code)
    own.forwards += 1
    end: float = max(run.forward_at[stage * count + number], now) + own.forward_s
    start_s = own.replayed_s
    if stage > 0:
        start_s = max(start_s, run.ends_s[code - 1] + own.up_s)
        before = run.stages[stage - 1]
        _taken(run, stage - 1, before.forwards > own.forwards and before.sending == _DOWN, now)
    own.replayed_s = start_s + own.forward_s
    own.left_s -= own.forward_s
    run.ends_s[code] = own.replayed_s
    if stage == len(run.stages) - 1:
        run.backward_at[stage * count + number] = end
    else:
        arrival = end + own.down_s
        run.forward_at[(stage + 1) * count + number] = arrival
        own.sending = _DOWN
        _arrives(run, stage + 1, arrival)
    return end


@lean_part
def _start_backward(run: Run, stage: int, now: float) -> float:
    own, count = run.stages[stage], run.state[0].micro_batches
    number, depth = own.backwards, len(run.stages)
    own.room += 1
    if not run.state[0].split:
        own.kept += 1
    code = (count + number) * depth + stage
    _order(run, stage, code)
    own.backwards += 1
    end: float = max(run.backward_at[stage * count + number], now) + own.backward_s
    if stage == depth - 1:
        needed_s = run.ends_s[code - count * depth]
    else:
        needed_s = run.ends_s[code + 1] + own.down_s
        after = run.stages[stage + 1]
        _taken(run, stage + 1, after.backwards > own.backwards and after.sending == _UP, now)
    own.replayed_s = max(own.replayed_s, needed_s) + own.backward_s
    own.left_s -= own.backward_s
    run.ends_s[code] = own.replayed_s
    if stage > 0:
        arrival = end + own.up_s
        run.backward_at[(stage - 1) * count + number] = arrival
        own.sending = _UP
        _arrives(run, stage - 1, arrival)
    return end


@lean_part
def _start_weight_grad(run: Run, stage: int, now: float) -> float:
    own = run.stages[stage]
    code = (2 * run.state[0].micro_batches + own.weights) * len(run.stages) + stage
    _order(run, stage, code)
    own.weights += 1
    own.kept += 1
    own.replayed_s += own.weight_s
    own.left_s -= own.weight_s
    run.ends_s[code] = own.replayed_s
    end: float = now + own.weight_s
    return end


@lean_part
def _order(run: Run, stage: int, code: int) -> None:
    own = run.stages[stage]
    run.codes[stage * run.state[0].per_stage + own.forwards + own.backwards + own.weights] = code


@lean_part
def _taken(run: Run, sender: int, may_go_on: bool, now: float) -> None:
    """A message has been received, so that its sender, and whoever was denied something, may go on."""
    state = run.state[0]
    if state.denied or may_go_on or run.stages[sender].awaits:
        run.stages[sender].awaits = False
        _wake(run, sender, now)
    if state.denied:
        for stage in range(len(run.stages)):
            if run.stages[stage].denied:
                run.stages[stage].denied = False
                _wake(run, stage, now)
        state.denied = 0


@lean_part
def _held_back(run: Run, stage: int) -> bool:
    """Whether the last message of a worker waits for the one before it to be received."""
    own = run.stages[stage]
    if own.sending == _DOWN:
        waits: bool = own.forwards > run.stages[stage + 1].forwards + 1
        return waits
    waits_up: bool = own.sending == _UP and own.backwards > run.stages[stage - 1].backwards + 1
    return waits_up


@lean_part
def _may_send_down(run: Run, stage: int) -> bool:
    """Whether sending an activation leaves no circle of workers that hold each other back."""
    if stage == len(run.stages) - 1 or run.stages[stage].forwards == run.stages[stage + 1].forwards:
        return True
    if run.state[0].gradients_only:
        # Nothing but this channel stops it.
        run.stages[stage].awaits = True
        return False
    return _no_circle(run, stage, stage + 1)


@lean_part
def _may_send_up(run: Run, stage: int) -> bool:
    """The same of a gradient."""
    if stage == 0 or run.stages[stage].backwards == run.stages[stage - 1].backwards:
        return True
    return _no_circle(run, stage, stage - 1)


@lean_part
def _no_circle(run: Run, stage: int, holder: int) -> bool:
    while _held_back(run, holder):
        holder += 1 if run.stages[holder].sending == _DOWN else -1
        if holder == stage:
            _deny(run, stage)
            run.state[0].strained = True
            return False
    return True


@lean_part
def _deny(run: Run, stage: int) -> None:
    if not run.stages[stage].denied:
        run.stages[stage].denied = True
        run.state[0].denied += 1


@lean_part
def _relax(run: Run) -> int:
    """Let one worker that only its limits stop run one more forward; returns it, or -1 when there is none."""
    first = -1
    for stage in range(len(run.stages)):
        can_go_on = not _held_back(run, stage) and _ready_forward(run, stage, math.inf)
        if can_go_on and (first < 0 or run.stages[stage].forwards < run.stages[first].forwards):
            first = stage
    if first >= 0:
        own = run.stages[first]
        own.room, own.kept = max(1, own.room), max(1, own.kept)
        run.state[0].beyond_limits = True
    return first
