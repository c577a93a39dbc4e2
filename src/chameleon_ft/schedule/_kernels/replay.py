"""Replay of orders, and of their neighbours in a local search.

An operation starts when its worker is free and its input has arrived, so its end is the longest path to it over the
operations. Recurring arguments:

- operations: the predecessor and the times of each operation, by code; `OPERATION` [operations].
- codes: the orders of all workers, one after the other; int64 [operations].
- first: the place in `codes` of each worker's first operation, then the number of operations; int64 [workers + 1].
- starts_s, ends_s: seconds since the start of the step, by code; float64 [operations].
- received_in, sent_in: by code, the channel that an operation receives from and sends into, or -1; int64 [operations].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from chameleon_ft.schedule.jit import kernel, kernel_part, no_refcount_inline
from chameleon_ft.schedule.records import Booleans, Floats, Integers, Records


@kernel
def longest_path(operations: Records, codes: Integers, first: Integers) -> tuple[Floats, Floats]:
    """Return the start and end of each operation, if workers run these orders and sends do not block.

    An operation that has no place in the orders, or never starts, ends at -1.
    """
    starts_s = np.zeros(len(operations))
    ends_s = np.empty(len(operations))
    _replay(operations, codes, first, starts_s, ends_s)
    return starts_s, ends_s


@kernel_part
def _replay(operations: Records, codes: Integers, first: Integers, starts_s: Floats, ends_s: Floats) -> None:
    """Fill in starts and ends: run each worker until it waits for an operation, and resume it when that has run."""
    num_workers = len(first) - 1
    ends_s[:] = -1.0
    # By worker: the place of its next operation, and when it is free.
    place = first[:-1].copy()
    free_s = np.zeros(num_workers)
    # Linked lists of waiting workers: by code the last one, and by worker the previous one; -1 if none.
    waiting = np.full(len(operations), -1)
    before = np.full(num_workers, -1)
    # A stack of the `left` workers that can run.
    runnable = np.arange(num_workers)
    left = num_workers
    while left:
        left -= 1
        worker = runnable[left]
        now = free_s[worker]
        while place[worker] < first[worker + 1]:
            code = codes[place[worker]]
            needed = operations[code].needs
            if needed >= 0:
                input_s = ends_s[needed]
                if input_s < 0:
                    before[worker] = waiting[needed]
                    waiting[needed] = worker
                    break
                now = max(now, input_s + operations[code].delay_s)
            else:
                now = max(now, operations[code].delay_s)
            starts_s[code] = now
            now += operations[code].duration_s
            ends_s[code] = now
            place[worker] += 1
            # Wake the workers that wait for this operation.
            other = waiting[code]
            while other >= 0:
                runnable[left] = other
                left += 1
                other = before[other]
        free_s[worker] = now


class Neighbourhood(NamedTuple):
    """Data that define the neighbours of orders.

    Attributes:
        workers: the index of each slot's worker; int64 [slots].
        operations, received_in, sent_in, first: as above.
        limits: micro-batches in flight, kept and deferred, by worker; int64 [3, workers].
        split: backward is split.
    """

    workers: Integers
    operations: Records
    received_in: Integers
    sent_in: Integers
    first: Integers
    limits: Integers
    split: bool


@kernel
def replay_neighbours(of: Neighbourhood, codes: Integers) -> tuple[Integers, Floats, Floats]:
    """Replay all orders that differ from `codes` by one change on the critical path.

    `codes` must complete within the limits. The path is followed from end to start, block by block. In each block,
    operations move to the front and to the end, as far as limits allow, and the first and the last are swapped with
    earlier ones of their kind, which keeps all limits. Messages in one channel keep their order.

    Returns:
        Changes, int64 [changes, 3]: 1 for a swap or 0 for a move, and the two places in `codes`. Seconds of the step
        after each change, and the sum of the workers' ends, both float64 [changes]; infinite for a deadlock.
    """
    starts_s, ends_s = np.zeros(len(codes)), np.empty(len(codes))
    _replay(of.operations, codes, of.first, starts_s, ends_s)
    changes = _changes(of, codes, starts_s, ends_s)
    steps_s, sums_s = np.empty(len(changes)), np.empty(len(changes))
    trial = codes.copy()
    for number in range(len(changes)):
        exchange, source, target = changes[number]
        _change(trial, exchange, source, target)
        _replay(of.operations, trial, of.first, starts_s, ends_s)
        steps_s[number], sums_s[number] = _last_ends(trial, of.first, ends_s)
        _change(trial, exchange, target, source)
    return changes, steps_s, sums_s


@kernel_part
def _changes(of: Neighbourhood, codes: Integers, starts_s: Floats, ends_s: Floats) -> Integers:
    """Return the changes to try, int64 [changes, 3], as in `replay_neighbours`."""
    workers, received_in, sent_in, first = of.workers, of.received_in, of.sent_in, of.first
    count, num_slots = 0, len(workers)
    changes = np.empty((64, 3), np.int64)
    trial = codes.copy()
    # The block that ends with `code`: places `begin` to `end` of the worker, whose operations begin at `low`.
    code = int(ends_s.argmax())
    while code >= 0:
        worker = workers[code % num_slots]
        low = end = first[worker]
        while codes[end] != code:
            end += 1
        begin = end
        while begin > low and ends_s[codes[begin - 1]] == starts_s[codes[begin]]:
            begin -= 1
        # At most two moves of each operation in the block, and swaps of two with all before them.
        while count + 2 * (end - begin + 1) + 2 * (end - low) > len(changes):
            changes = np.concatenate((changes, np.empty_like(changes)))
        # Move each operation to the front and to the end.
        for source in range(begin, end + 1):
            for target in (begin, end):
                # In a block of two, both moves are the same.
                if source == target or (end == begin + 1 and source == end):
                    continue
                between = codes[target:source] if target < source else codes[source + 1 : target + 1]
                if _passes(num_slots, received_in, sent_in, codes[source], between):
                    _change(trial, 0, source, target)
                    if _is_within(of.limits[:, worker], trial[low : first[worker + 1]], num_slots, of.split):
                        changes[count] = 0, source, target
                        count += 1
                    _change(trial, 0, target, source)
        # Swap the first and the last with operations of their kind before them.
        for place in (begin, end):
            if begin == end:
                break
            for other in range(place - 1, low - 1, -1):
                if _must_stay_in_order(num_slots, received_in, sent_in, codes[place], codes[other]):
                    break
                alike = codes[place] // num_slots == codes[other] // num_slots
                if alike and _passes(num_slots, received_in, sent_in, codes[other], codes[other + 1 : place]):
                    changes[count] = 1, place, other
                    count += 1
        code = of.operations[codes[begin]].needs
    return changes[:count]


@kernel
def changed(codes: Integers, exchange: int, source: int, target: int) -> Integers:
    """Return `codes` after one change of `replay_neighbours`."""
    trial = codes.copy()
    _change(trial, exchange, source, target)
    return trial


@no_refcount_inline
def _change(codes: Integers, exchange: int, source: int, target: int) -> None:
    """Swap two operations, or move the one at `source` to `target`; with the places exchanged, undo that."""
    code = codes[source]
    if exchange:
        codes[source] = codes[target]
    else:
        step = 1 if target > source else -1
        for place in range(source, target, step):
            codes[place] = codes[place + step]
    codes[target] = code


@no_refcount_inline
def _passes(num_slots: int, received_in: Integers, sent_in: Integers, code: int, others: Integers) -> bool:
    """Return whether an operation may move past all of `others`."""
    for other in others:
        if _must_stay_in_order(num_slots, received_in, sent_in, code, other):
            return False
    return True


@no_refcount_inline
def _must_stay_in_order(num_slots: int, received_in: Integers, sent_in: Integers, one: int, other: int) -> bool:
    """Return whether two operations are on the same hop, or both receive, or both send, through one channel."""
    received, sent = received_in[one], sent_in[one]
    same_hop: bool = one % num_slots == other % num_slots
    both_receive: bool = received >= 0 and received == received_in[other]
    both_send: bool = sent >= 0 and sent == sent_in[other]
    return same_hop or both_receive or both_send


@no_refcount_inline
def _is_within(limits: Integers, order: Integers, num_slots: int, split: bool) -> bool:
    """Return whether a worker that runs this order stays within its limits."""
    in_flight, kept, deferred = limits
    for code in order:
        if code < num_slots:
            in_flight -= 1
            kept -= 1
            if in_flight < 0 or kept < 0:
                return False
        elif code < 2 * num_slots:
            in_flight += 1
            if not split:
                kept += 1
            else:
                deferred -= 1
                if deferred < 0:
                    return False
        else:
            kept += 1
            deferred += 1
    return True


@no_refcount_inline
def _last_ends(codes: Integers, first: Integers, ends_s: Floats) -> tuple[float, float]:
    """Return the latest end of the workers' last operations, and the sum of these ends; infinite if one never runs."""
    step_s = sum_s = 0.0
    for worker in range(len(first) - 1):
        if first[worker + 1] > first[worker]:
            end_s = ends_s[codes[first[worker + 1] - 1]]
            if end_s < 0:
                return math.inf, math.inf
            step_s = max(step_s, end_s)
            sum_s += end_s
    return step_s, sum_s


@kernel
def run_blocking(
    starts: Integers,
    sources: Integers,
    targets: Integers,
    senders: Integers,
    receivers: Integers,
) -> tuple[Integers, Booleans]:
    """Run all workers until each has ended or is blocked, where a send into a channel with a message blocks its worker.

    Args:
        starts: the first operation of each worker, then the number of operations; int64 [workers + 1].
        sources, targets: the channel that each operation receives from and sends into, or -1; int64 [operations].
        senders, receivers: the workers at the ends of each channel; int64 [channels].

    Returns:
        By worker, the operation at which it is blocked (or its end), and whether it has run that operation but not sent
        the result; int64 and bool [workers].
    """
    count = len(starts) - 1
    position = starts[:-1].copy()
    sending = np.zeros(count, np.bool_)
    held = np.zeros(len(senders), np.int64)
    # A stack of workers to look at, of which `number` are on it.
    waiting = np.arange(count)
    is_waiting = np.ones(count, np.bool_)
    number = count
    while number:
        number -= 1
        worker = waiting[number]
        is_waiting[worker] = False
        while position[worker] < starts[worker + 1]:
            source, target = sources[position[worker]], targets[position[worker]]
            woken = -1
            if not sending[worker]:
                if source >= 0:
                    if not held[source]:
                        break
                    held[source] -= 1
                    woken = senders[source]
                sending[worker] = True
            elif target < 0 or not held[target]:
                if target >= 0:
                    held[target] += 1
                    woken = receivers[target]
                sending[worker] = False
                position[worker] += 1
            else:
                break
            if woken >= 0 and woken != worker and not is_waiting[woken]:
                waiting[number] = woken
                is_waiting[woken] = True
                number += 1
    return position, sending
