"""The event loop of the list scheduler, on the arrays of a network.

Time advances from decision to decision: a free worker takes an operation whose input has arrived. The receiver knows
the arrival time of a message as soon as the operation that produces it starts.

Channels hold one message, as in `check_program`: a worker may run one operation ahead of a full channel, and is then
blocked until the receiver has taken a message out. It must not do so if the receiver is itself blocked, directly or
through other workers, by this worker. So the decisions, in the order in which they are made, are a run with blocking
sends that ends, and the program they make cannot deadlock.

In the rest of an interrupted step slots lack operations that ran before or are not needed. The messages that are sent
again are in channels of their own from the start, and block no sender.
"""

from __future__ import annotations

import math
from typing import Final

from chameleon_ft.schedule._kernels.event_heap import pop_event, push_event
from chameleon_ft.schedule._kernels.scheduler_state import Run
from chameleon_ft.schedule.jit import no_refcount_inline, no_refcount_kernel

# Arrivals this close (relative to the longest operation) differ by rounding only.
_SLACK: Final = 1e-9


@no_refcount_kernel
def run_scheduler(run: Run) -> tuple[bool, bool, bool]:
    """Schedule all operations; return whether the schedule is complete, strained, and beyond a limit.

    It is incomplete if any further operation would close a cycle of blocked workers. If limits stop all workers, the
    one with the first ready forward exceeds its own.
    """
    state = run.state[0]
    _connect(run)
    _start_routes(run)
    remaining = len(run.codes)
    now = 0.0
    while remaining:
        if state.events:
            now, worker = pop_event(run)
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
            push_event(run, end, worker)
    return True, (state.strained or state.beyond_limits) and not run.gradients_only, state.beyond_limits


@no_refcount_inline
def _connect(run: Run) -> None:
    """Set workers to their limits, and link each to its queues in ascending order."""
    num_channels, num_workers = len(run.channels), len(run.workers)
    for index in range(num_workers):
        worker, starts = run.workers[index], num_channels + 2 * index
        worker.room, worker.kept, worker.deferred = run.limits[0, index], run.limits[1, index], run.limits[2, index]
        worker.done, worker.sending = run.first[index], -1
        worker.starts, worker.pending = starts, starts + 1
        worker.forward_in, worker.backward_in = starts, -1
        run.queues[starts].head = run.queues[starts + 1].head = run.queues[starts].next_in = -1
        run.queues[starts + 1].gradient = True
    for number in range(num_channels - 1, -1, -1):
        queue, channel = run.queues[number], run.channels[number]
        queue.sender, queue.receiver, queue.gradient = channel.sender, channel.receiver, channel.gradient
        queue.remote, queue.head = channel.sender != channel.receiver, -1
        receiver = run.workers[channel.receiver]
        if channel.gradient:
            queue.next_in, receiver.backward_in = receiver.backward_in, number
        else:
            queue.next_in, receiver.forward_in = receiver.forward_in, number


@no_refcount_inline
def _start_routes(run: Run) -> None:
    state = run.state[0]
    for rank in range(len(run.by_priority)):
        slot = run.by_priority[rank]
        is_last = False
        while not is_last:
            run.hops[slot].rank = rank
            own = run.slots[slot]
            state.slack_s = max(state.slack_s, _SLACK * own.forward_s, _SLACK * own.backward_s)
            is_last = own.last
            _resume(run, slot)
            slot += 1
    for worker in range(len(run.workers)):
        push_event(run, 0.0, worker)


@no_refcount_inline
def _resume(run: Run, slot: int) -> None:
    """Queue a slot for what it can run from the start: the first F of its route, or what follows what ran before."""
    own, worker = run.slots[slot], run.workers[run.slots[slot].worker]
    run.hops[slot].lacks_forward = own.runs_forward
    if own.runs_forward:
        if own.up < 0:
            _append(run, worker.starts, slot)
        elif not run.slots[slot - 1].runs_forward:
            before = run.slots[slot - 1]
            run.hops[slot].forward_at = before.down_s
            _append(run, before.down, slot)
            push_event(run, before.down_s, own.worker)
    elif own.runs_backward:
        worker.room -= 1
        worker.kept -= 1
        if own.last:
            _append(run, own.down, slot)
    if own.runs_weight_grad and not own.runs_backward:
        worker.kept -= 1
        worker.deferred -= 1
        _append(run, worker.pending, slot)
    if own.runs_backward and not own.last and not run.slots[slot + 1].runs_backward:
        after = run.slots[slot + 1]
        run.hops[slot].backward_at = after.up_s
        _append(run, after.up, slot)
        push_event(run, after.up_s, own.worker)


@no_refcount_inline
def _decide(run: Run, worker: int, now: float) -> float:
    """Start the operation that `worker` should run now; return its end, or -1 if there is none."""
    own = run.workers[worker]
    horizon = now + run.state[0].slack_s
    is_pending = run.queues[own.pending].head >= 0
    # Another I would defer more W than allowed.
    is_full = own.deferred <= 0
    forward = -1
    if own.room > 0 and run.forward_first:
        forward = _ready(run, worker, True, horizon)
        if forward >= 0:
            if own.kept > 0:
                return _start_forward(run, worker, forward, now)
            if is_pending:
                return _start_weight_grad(run, worker, now)
    backward = _ready(run, worker, False, horizon)
    if backward >= 0:
        if is_full:
            return _start_weight_grad(run, worker, now)
        return _start_backward(run, worker, backward, now)
    if own.room > 0 and not run.forward_first:
        forward = _ready(run, worker, True, horizon)
        if forward >= 0 and own.kept > 0:
            return _start_forward(run, worker, forward, now)
    if is_pending and (is_full or forward >= 0 or not _better_soon(run, worker, horizon)):
        return _start_weight_grad(run, worker, now)
    return -1.0


@no_refcount_inline
def _ready(run: Run, worker: int, forward: bool, horizon: float) -> int:
    """Return the slot of the ready forward, or backward, of highest priority whose result may be sent, or -1."""
    best = -1
    queue = run.workers[worker].forward_in if forward else run.workers[worker].backward_in
    while queue >= 0:
        slot = run.queues[queue].head
        # In the rest of a step a gradient can be there before F has run.
        is_early = slot >= 0 and not forward and run.hops[slot].lacks_forward
        if (
            slot >= 0
            and not is_early
            and (run.hops[slot].forward_at if forward else run.hops[slot].backward_at) <= horizon
        ):
            channel = _channel_after(run, slot, forward)
            # `_may_send` comes last because it records a denial.
            if _goes_before(run, slot, best) and _may_send(run, worker, channel):
                best = slot
        queue = run.queues[queue].next_in
    return best


@no_refcount_inline
def _channel_after(run: Run, slot: int, forward: bool) -> int:
    """The channel into which F, or B or I, sends its result; -1 if no operation takes it."""
    own = run.slots[slot]
    if forward:
        down: int = own.down if own.last or run.slots[slot + 1].runs_forward else -1
        return down
    up: int = own.up if own.up < 0 or run.slots[slot - 1].runs_backward else -1
    return up


@no_refcount_inline
def _goes_before(run: Run, slot: int, best: int) -> bool:
    return best < 0 or run.hops[slot].rank < run.hops[best].rank


@no_refcount_inline
def _better_soon(run: Run, worker: int, horizon: float) -> bool:
    """Return whether an input that the worker can use arrives within its patience for the next W."""
    own = run.workers[worker]
    until = horizon + run.patience * run.slots[run.queues[own.pending].head].weight_s
    for forward in (False, True):
        queue = own.forward_in if forward else own.backward_in
        while queue >= 0 and not (forward and (own.room <= 0 or own.kept <= 0)):
            slot = run.queues[queue].head
            if slot >= 0 and horizon < (run.hops[slot].forward_at if forward else run.hops[slot].backward_at) < until:
                return True
            queue = run.queues[queue].next_in
    return False


@no_refcount_inline
def _start_forward(run: Run, worker: int, slot: int, now: float) -> float:
    hop, own = run.slots[slot], run.workers[worker]
    if hop.runs_backward:
        own.room -= 1
        own.kept -= 1
    run.hops[slot].lacks_forward = False
    _append_code(run, worker, slot)
    end: float = max(run.hops[slot].forward_at, now) + hop.forward_s
    if hop.up < 0:
        _remove_first(run, own.starts)
    else:
        _take(run, run.slots[slot - 1].down, now)
    if hop.last:
        if hop.runs_backward:
            run.hops[slot].backward_at = end
            _append(run, hop.down, slot)
        return end
    if run.slots[slot + 1].runs_forward:
        run.hops[slot + 1].forward_at = end + hop.down_s
        _send(run, worker, hop.down, slot + 1, end + hop.down_s)
    return end


@no_refcount_inline
def _start_backward(run: Run, worker: int, slot: int, now: float) -> float:
    hop, own = run.slots[slot], run.workers[worker]
    own.room += 1
    _append_code(run, worker, len(run.slots) + slot)
    end: float = max(run.hops[slot].backward_at, now) + hop.backward_s
    if hop.last:
        _remove_first(run, hop.down)
    else:
        _take(run, run.slots[slot + 1].up, now)
    if hop.runs_weight_grad:
        own.deferred -= 1
        _append(run, own.pending, slot)
    else:
        own.kept += 1
    if hop.up >= 0 and run.slots[slot - 1].runs_backward:
        run.hops[slot - 1].backward_at = end + hop.up_s
        _send(run, worker, hop.up, slot - 1, end + hop.up_s)
    return end


@no_refcount_inline
def _start_weight_grad(run: Run, worker: int, now: float) -> float:
    own = run.workers[worker]
    slot = run.queues[own.pending].head
    _remove_first(run, own.pending)
    own.deferred += 1
    own.kept += 1
    _append_code(run, worker, 2 * len(run.slots) + slot)
    end: float = now + run.slots[slot].weight_s
    return end


@no_refcount_inline
def _append_code(run: Run, worker: int, code: int) -> None:
    run.codes[run.workers[worker].done] = code
    run.workers[worker].done += 1


@no_refcount_inline
def _append(run: Run, queue: int, slot: int) -> None:
    own = run.queues[queue]
    if own.head < 0:
        own.head = slot
    else:
        _set_next(run, queue, own.tail, slot)
    _set_next(run, queue, slot, -1)
    own.tail = slot


@no_refcount_inline
def _set_next(run: Run, queue: int, slot: int, following: int) -> None:
    if run.queues[queue].gradient:
        run.hops[slot].next_backward = following
    else:
        run.hops[slot].next = following


@no_refcount_inline
def _next(run: Run, queue: int, slot: int) -> int:
    hop = run.hops[slot]
    following: int = hop.next_backward if run.queues[queue].gradient else hop.next
    return following


@no_refcount_inline
def _remove_first(run: Run, queue: int) -> None:
    run.queues[queue].head = _next(run, queue, run.queues[queue].head)


@no_refcount_inline
def _send(run: Run, worker: int, channel: int, slot: int, arrival: float) -> None:
    _append(run, channel, slot)
    queue = run.queues[channel]
    if queue.remote:
        run.workers[worker].sending = channel
        # A receiver that is busy for longer decides when it is free.
        if run.workers[queue.receiver].free <= arrival:
            push_event(run, arrival, queue.receiver)


@no_refcount_inline
def _take(run: Run, channel: int, now: float) -> None:
    """Take the first message out of a channel, and wake its sender and the workers that were denied a send."""
    queue, state = run.queues[channel], run.state[0]
    _remove_first(run, channel)
    if not queue.remote:
        return
    sender = run.workers[queue.sender]
    if state.denied or queue.awaited or (queue.head >= 0 and sender.sending == channel):
        push_event(run, max(sender.free, now), queue.sender)
        queue.awaited = False
    if state.denied:
        for worker in range(len(run.workers)):
            if run.workers[worker].denied:
                run.workers[worker].denied = False
                push_event(run, now, worker)
        state.denied = False


@no_refcount_inline
def _is_blocked(run: Run, worker: int) -> bool:
    """Return whether the last message of `worker` waits for the receiver to take the one before it."""
    channel = run.workers[worker].sending
    if channel < 0 or run.queues[channel].head < 0:
        return False
    blocked: bool = _next(run, channel, run.queues[channel].head) >= 0
    return blocked


@no_refcount_inline
def _may_send(run: Run, worker: int, channel: int) -> bool:
    """Return whether sending into `channel` closes no cycle of blocked workers; record a denial if it would."""
    if channel < 0:
        return True
    queue = run.queues[channel]
    if queue.head < 0 or not queue.remote:
        return True
    if run.gradients_only and not queue.gradient:
        # The sender is woken when the receiver takes a message from this channel.
        queue.awaited = True
        return False
    holder = queue.receiver
    while _is_blocked(run, holder):
        holder = run.queues[run.workers[holder].sending].receiver
        if holder == worker:
            run.workers[worker].denied = run.state[0].denied = run.state[0].strained = True
            return False
    return True


@no_refcount_inline
def _exceed_limit(run: Run) -> int:
    """Allow one more forward on a worker that only its limits stop; return the worker, or -1 if there is none."""
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
