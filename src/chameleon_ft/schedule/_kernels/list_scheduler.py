"""The event loop of the list scheduler, on the arrays of a network.

Time advances from decision to decision: a worker that is free takes one of the operations whose input is there. A
message is known to its receiver as soon as the operation that makes it starts, with the time at which it will arrive.

Channels hold one message, as in `check_program`: a worker may run one operation ahead of a full channel, and is then
blocked until the receiver has taken a message out. It must not do so if the receiver is itself blocked, directly or
through other workers, by this worker. So the decisions, in the order in which they are made, are a run with blocking
sends that ends, and the program they make cannot deadlock.
"""

from __future__ import annotations

import math

from chameleon_ft.schedule._kernels.scheduler_state import Run
from chameleon_ft.schedule.jit import no_refcount_inline, no_refcount_kernel
from chameleon_ft.schedule.records import Integers


@no_refcount_kernel
def run_scheduler(
    run: Run, ways: Integers, split: bool, forward_first: bool, patience: float, gradients_only: bool
) -> tuple[bool, bool, bool]:
    """Schedule; returns whether all operations have been, whether it is strained, and whether it exceeds a limit.

    There is a dead end if any further operation would close a cycle of blocked workers. If limits stop all workers, the
    one with the first ready forward exceeds its own.

    Args:
        run: as it is at time zero.
        ways: the first slot of each route by priority, the highest first; int64 [routes].
        split: whether backward is split.
        forward_first, patience, gradients_only: of `Rules`.
    """
    state = run.state[0]
    state.split, state.forward_first = split, forward_first
    state.patience, state.gradients_only = patience, gradients_only
    _start_routes(run, ways)
    remaining = len(run.codes)
    now = 0.0
    while remaining:
        if state.events:
            now, worker = _pop(run)
            # The last message of a worker may wait for the one before it to be received.
            if run.workers[worker].free > now or _is_blocked(run, worker):
                continue
        else:
            worker = _exceed_limit(run)
            if worker < 0:
                return False, False, False
        end = _decide(run, worker, now)
        if end >= 0:
            remaining -= 1
            run.workers[worker].free = end
            _push(run, end, worker)
    return True, (state.strained or state.beyond_limits) and not gradients_only, state.beyond_limits


@no_refcount_inline
def _start_routes(run: Run, ways: Integers) -> None:
    starts = len(run.queues) - len(run.workers)
    for place in range(len(ways)):
        slot = ways[place]
        _append(run, starts + run.slots[slot].worker, slot)
        run.hops[slot].rank = place
        while not run.slots[slot].last:
            slot += 1
            run.hops[slot].rank = place
    for worker in range(len(run.workers)):
        _push(run, 0.0, worker)


@no_refcount_inline
def _decide(run: Run, worker: int, now: float) -> float:
    """Start the operation that `worker` should run now; returns its end, or -1 if there is none."""
    state, own = run.state[0], run.workers[worker]
    horizon = now + state.slack_s
    pending = own.pending_end > own.pending
    # A further I would defer more W than allowed.
    full = own.pending_end - own.pending >= own.deferred
    forward = -1
    if own.room > 0 and state.forward_first:
        forward = _ready(run, worker, True, horizon)
        if forward >= 0:
            if own.kept > 0:
                return _start_forward(run, worker, forward, now)
            if pending:
                return _start_weight_grad(run, worker, now)
    backward = _ready(run, worker, False, horizon)
    if backward >= 0:
        if full:
            return _start_weight_grad(run, worker, now)
        return _start_backward(run, worker, backward, now)
    if own.room > 0 and not state.forward_first:
        forward = _ready(run, worker, True, horizon)
        if forward >= 0 and own.kept > 0:
            return _start_forward(run, worker, forward, now)
    if pending and (full or forward >= 0 or not _better_soon(run, worker, horizon)):
        return _start_weight_grad(run, worker, now)
    return -1.0


@no_refcount_inline
def _ready(run: Run, worker: int, forward: bool, horizon: float) -> int:
    """The slot of the ready forward, or backward, with the highest priority whose result may be sent, or -1."""
    own, best = run.workers[worker], -1
    begin, end = (own.forward_in, own.forward_in_end) if forward else (own.backward_in, own.backward_in_end)
    for place in range(begin, end):
        slot = _first_in(run, run.lists[place])
        if slot >= 0 and (run.hops[slot].forward_at if forward else run.hops[slot].backward_at) <= horizon:
            channel = run.slots[slot].down if forward else run.slots[slot].up
            # `_may_send` comes last because it records a denial.
            if _goes_before(run, slot, best) and _may_send(run, worker, channel):
                best = slot
    return best


@no_refcount_inline
def _goes_before(run: Run, slot: int, best: int) -> bool:
    return best < 0 or run.hops[slot].rank < run.hops[best].rank


@no_refcount_inline
def _better_soon(run: Run, worker: int, horizon: float) -> bool:
    """Whether a tensor that the worker can use arrives within its patience for the next W."""
    own = run.workers[worker]
    until = horizon + run.state[0].patience * run.slots[run.lists[own.pending]].weight_s
    for place in range(own.backward_in, own.backward_in_end):
        slot = _first_in(run, run.lists[place])
        if slot >= 0 and horizon < run.hops[slot].backward_at < until:
            return True
    if own.room > 0 and own.kept > 0:
        for place in range(own.forward_in, own.forward_in_end):
            slot = _first_in(run, run.lists[place])
            if slot >= 0 and horizon < run.hops[slot].forward_at < until:
                return True
    return False


@no_refcount_inline
def _start_forward(run: Run, worker: int, slot: int, now: float) -> float:
    hop = run.slots[slot]
    run.workers[worker].room -= 1
    run.workers[worker].kept -= 1
    _append_code(run, worker, slot)
    end: float = max(run.hops[slot].forward_at, now) + hop.forward_s
    if hop.up < 0:
        run.queues[len(run.queues) - len(run.workers) + worker].head += 1
    else:
        _take(run, run.slots[slot - 1].down, now)
    if hop.last:
        run.hops[slot].backward_at = end
        _append(run, hop.down, slot)
    else:
        run.hops[slot + 1].forward_at = end + hop.down_s
        _send(run, worker, hop.down, slot + 1, end + hop.down_s)
    return end


@no_refcount_inline
def _start_backward(run: Run, worker: int, slot: int, now: float) -> float:
    hop, own = run.slots[slot], run.workers[worker]
    own.room += 1
    if run.state[0].split:
        run.lists[own.pending_end] = slot
        own.pending_end += 1
    else:
        own.kept += 1
    _append_code(run, worker, len(run.slots) + slot)
    end: float = max(run.hops[slot].backward_at, now) + hop.backward_s
    if hop.last:
        run.queues[hop.down].head += 1
    else:
        _take(run, run.slots[slot + 1].up, now)
    if hop.up >= 0:
        run.hops[slot - 1].backward_at = end + hop.up_s
        _send(run, worker, hop.up, slot - 1, end + hop.up_s)
    return end


@no_refcount_inline
def _start_weight_grad(run: Run, worker: int, now: float) -> float:
    own = run.workers[worker]
    slot = run.lists[own.pending]
    own.pending += 1
    own.kept += 1
    _append_code(run, worker, 2 * len(run.slots) + slot)
    end: float = now + run.slots[slot].weight_s
    return end


@no_refcount_inline
def _append_code(run: Run, worker: int, code: int) -> None:
    run.codes[run.workers[worker].done] = code
    run.workers[worker].done += 1


@no_refcount_inline
def _first_in(run: Run, queue: int) -> int:
    """The first slot in a queue, or -1."""
    own = run.queues[queue]
    return run.lists[own.head] if own.tail > own.head else -1


@no_refcount_inline
def _append(run: Run, queue: int, slot: int) -> None:
    run.lists[run.queues[queue].tail] = slot
    run.queues[queue].tail += 1


@no_refcount_inline
def _send(run: Run, worker: int, channel: int, slot: int, arrival: float) -> None:
    _append(run, channel, slot)
    queue = run.queues[channel]
    if queue.remote:
        run.workers[worker].sending = channel
        # A receiver that is busy beyond then decides anyway when it is free.
        if run.workers[queue.receiver].free <= arrival:
            _push(run, arrival, queue.receiver)


@no_refcount_inline
def _take(run: Run, channel: int, now: float) -> None:
    queue, denied = run.queues[channel], run.state[0].denied
    queue.head += 1
    if not queue.remote:
        return
    sender = run.workers[queue.sender]
    if denied >= 0 or queue.awaited or (queue.tail > queue.head and sender.sending == channel):
        _push(run, max(sender.free, now), queue.sender)
        queue.awaited = False
    while denied >= 0:
        run.workers[denied].denied = False
        _push(run, now, denied)
        denied = run.workers[denied].next_denied
    run.state[0].denied = -1


@no_refcount_inline
def _is_blocked(run: Run, worker: int) -> bool:
    """Whether the last message of `worker` waits for the receiver to take the one before it."""
    channel = run.workers[worker].sending
    held_back: bool = channel >= 0 and run.queues[channel].tail > run.queues[channel].head + 1
    return held_back


@no_refcount_inline
def _may_send(run: Run, worker: int, channel: int) -> bool:
    """Whether sending into `channel` closes no cycle of blocked workers; if it does, that is recorded as a denial."""
    if channel < 0:
        return True
    queue = run.queues[channel]
    if queue.tail == queue.head or not queue.remote:
        return True
    if run.state[0].gradients_only and not queue.gradient:
        # The sender is woken when the receiver takes a message from this channel.
        queue.awaited = True
        return False
    holder = queue.receiver
    while _is_blocked(run, holder):
        holder = run.queues[run.workers[holder].sending].receiver
        if holder == worker:
            own, state = run.workers[worker], run.state[0]
            if not own.denied:
                own.denied, own.next_denied, state.denied = True, state.denied, worker
            state.strained = True
            return False
    return True


@no_refcount_inline
def _exceed_limit(run: Run) -> int:
    """Allow one more forward on a worker that only its limits stop; returns the worker, or -1 if there is none."""
    first, best = -1, -1
    for worker in range(len(run.workers)):
        if not _is_blocked(run, worker):
            slot = _ready(run, worker, True, math.inf)
            if slot >= 0 and _goes_before(run, slot, best):
                first, best = worker, slot
    if first >= 0:
        own = run.workers[first]
        own.room, own.kept = max(1, own.room), max(1, own.kept)
        run.state[0].beyond_limits = True
    return first


@no_refcount_inline
def _push(run: Run, at_s: float, worker: int) -> None:
    """Add an event to the heap; of events at one time, that of the lowest worker comes first."""
    events = run.events
    place = run.state[0].events
    run.state[0].events += 1
    while place:
        above = (place - 1) // 2
        if not _is_before(at_s, worker, events[above].at_s, events[above].worker):
            break
        events[place] = events[above]
        place = above
    events[place].at_s, events[place].worker = at_s, worker


@no_refcount_inline
def _pop(run: Run) -> tuple[float, int]:
    """Remove the first event from the heap."""
    events = run.events
    first_s, first = events[0].at_s, events[0].worker
    run.state[0].events -= 1
    count = run.state[0].events
    last_s, last = events[count].at_s, events[count].worker
    place = 0
    while 2 * place + 1 < count:
        below = 2 * place + 1
        if below + 1 < count and _is_before(
            events[below + 1].at_s, events[below + 1].worker, events[below].at_s, events[below].worker
        ):
            below += 1
        if not _is_before(events[below].at_s, events[below].worker, last_s, last):
            break
        events[place] = events[below]
        place = below
    events[place].at_s, events[place].worker = last_s, last
    return first_s, first


@no_refcount_inline
def _is_before(one_s: float, one: int, other_s: float, other: int) -> bool:
    return one_s < other_s or (one_s == other_s and one < other)
