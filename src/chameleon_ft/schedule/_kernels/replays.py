"""Replays of orders, and the search for shorter ones that is made of them.

An operation starts when its worker is free and what it needs is there: the end of the last one is the longest path.
Orders are given as the codes of all operations, worker by worker, and the place of each worker's first; the last place
is their number.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.schedule._kernels.jit import kernel, lean_part, part_of_kernel
from chameleon_ft.schedule._records import Floats, Integers, Records

# To tell states from each other at a glance.
_FACTOR: Final = 1_000_003


@kernel
def longest_path(operations: Records, codes: Integers, first: Integers) -> tuple[Floats, Floats]:
    """Start and end of each operation by its code, in seconds, when every worker runs its own in the order given.

    An operation that is in no order, or that waits for ever, ends at -1.
    """
    starts_s = np.zeros(len(operations))
    ends_s = np.empty(len(operations))
    _replay(operations, codes, first, starts_s, ends_s)
    return starts_s, ends_s


@part_of_kernel
def _replay(operations: Records, codes: Integers, first: Integers, starts_s: Floats, ends_s: Floats) -> None:
    ends_s[:] = -1.0
    _replay_rest(operations, codes, first, first[:-1].copy(), np.full(len(operations), -1), starts_s, ends_s)


@part_of_kernel
def _replay_changed(
    operations: Records,
    codes: Integers,
    first: Integers,
    from_s: float,
    known_starts_s: Floats,
    known_ends_s: Floats,
    waiting: Integers,
    starts_s: Floats,
    ends_s: Floats,
) -> None:
    """Replay orders that differ from others, whose times are known, only in operations that started at `from_s` or
    later. Those that started before need nothing of what comes after, so they stay as they are; of these no starts are
    written.
    """
    ends_s[:] = known_ends_s
    place = first[:-1].copy()
    for worker in range(len(place)):
        low, high = first[worker], first[worker + 1]
        while low < high:
            middle = (low + high) // 2
            if known_starts_s[codes[middle]] < from_s:
                low = middle + 1
            else:
                high = middle
        place[worker] = low
        for later in range(low, first[worker + 1]):
            ends_s[codes[later]] = -1.0
    _replay_rest(operations, codes, first, place, waiting, starts_s, ends_s)


@part_of_kernel
def _replay_rest(
    operations: Records,
    codes: Integers,
    first: Integers,
    place: Integers,
    waiting: Integers,
    starts_s: Floats,
    ends_s: Floats,
) -> None:
    """From these places on, by worker.

    `waiting` has, by operation, the last worker that has come to wait for it: nobody before, and nobody afterwards.
    """
    num_workers = len(first) - 1
    free_s = np.zeros(num_workers)
    for worker in range(num_workers):
        if place[worker] > first[worker]:
            free_s[worker] = ends_s[codes[place[worker] - 1]]
    # By worker the one that came to wait before.
    before = np.full(num_workers, -1)
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
                there_s = ends_s[needed]
                if there_s < 0:
                    before[worker] = waiting[needed]
                    waiting[needed] = worker
                    break
                now = max(now, there_s + operations[code].delay_s)
            starts_s[code] = now
            now += operations[code].duration_s
            ends_s[code] = now
            place[worker] += 1
            other = waiting[code]
            while other >= 0:
                runnable[left] = other
                left += 1
                other = before[other]
            waiting[code] = -1
        free_s[worker] = now
    for worker in range(num_workers):
        # For ever, so that nobody comes after it.
        if place[worker] < first[worker + 1]:
            waiting[operations[codes[place[worker]]].needs] = -1


class _Search(NamedTuple):
    """What may be done with the orders of a network, and room to work in.

    Attributes:
        slots, channels: of the network.
        operations: by code.
        split: whether backward is split.
        in_flight, kept: limits by worker.
        received_in, sent_in, sent_for: by code, the channel through which an operation receives, that through which it
            sends, and the operation that needs what it sends; -1 where there is none.
        first: the place of each worker's first operation.
    """

    slots: Records
    channels: Records
    operations: Records
    split: bool
    in_flight: Integers
    kept: Integers
    received_in: Integers
    sent_in: Integers
    sent_for: Integers
    first: Integers


class _Neighbours(NamedTuple):
    """Changed orders of single workers, and how long the step is then.

    Of two steps that are equally long, the better is that with the lower sum of the workers' ends.

    Attributes:
        orders: a row for each, as long as the longest order.
        worker: whose it is.
        step_s, sum_s: see above.
    """

    orders: Integers
    worker: Integers
    step_s: Floats
    sum_s: Floats


@kernel
def shortened_codes(
    slots: Records,
    channels: Records,
    operations: Records,
    codes: Integers,
    first: Integers,
    in_flight: Integers,
    kept: Integers,
    split: bool,
    enough_s: float,
    effort: int,
) -> Integers:
    """Codes of orders that take no longer than those given, and keep within the limits, as these must.

    The search ends at `enough_s`, when there is nothing left to try, or when `effort` operations have been replayed.

    Args:
        slots, channels, operations: of the network.
        codes, first: orders.
        in_flight, kept: limits by worker.
        split: whether backward is split.
        enough_s, effort: see above.
    """
    num_codes = len(operations)
    received_in, sent_in, sent_for = _messages(slots, num_codes)
    search = _Search(slots, channels, operations, split, in_flight, kept, received_in, sent_in, sent_for, first)
    starts_s, ends_s = np.zeros(num_codes), np.empty(num_codes)
    present = codes.copy()
    _replay(operations, present, first, starts_s, ends_s)
    replayed = num_codes
    present_s = ends_s.max()
    best, best_s = present.copy(), present_s
    # Every state but the last costs the replay of a neighbour at least.
    seen = np.empty((effort // num_codes + 2, num_codes), np.int64)
    marks = np.empty(len(seen), np.int64)
    seen[0], marks[0], num_seen = present, _mark(present), 1
    while best_s > enough_s and replayed < effort:
        neighbours, count, trials = _neighbours(
            search, present, starts_s, ends_s, present_s, seen[:num_seen], marks[:num_seen]
        )
        replayed += trials * num_codes
        following = _best_that_runs(search, present, neighbours, count)
        if following < 0:
            break
        _change(present, first, neighbours, following)
        _replay(operations, present, first, starts_s, ends_s)
        present_s = ends_s.max()
        seen[num_seen], marks[num_seen] = present, _mark(present)
        num_seen += 1
        if present_s < best_s:
            best, best_s = present.copy(), present_s
    return best


@part_of_kernel
def _messages(slots: Records, num_codes: int) -> tuple[Integers, Integers, Integers]:
    count = len(slots)
    received_in, sent_in, sent_for = np.full(num_codes, -1), np.full(num_codes, -1), np.full(num_codes, -1)
    for slot in range(count - 1):
        if slots[slot].last or slots[slot].worker == slots[slot + 1].worker:
            continue
        # Between this slot and the next on its route: the activation down, and its gradient up.
        down, up = slots[slot].down, slots[slot + 1].up
        sent_in[slot], received_in[slot + 1], sent_for[slot] = down, down, slot + 1
        sent_in[count + slot + 1], received_in[count + slot], sent_for[count + slot + 1] = up, up, count + slot
    return received_in, sent_in, sent_for


@lean_part
def _mark(codes: Integers) -> int:
    mark = 0
    for code in codes:
        mark = mark * _FACTOR + code
    return mark


@part_of_kernel
def _neighbours(
    search: _Search,
    present: Integers,
    starts_s: Floats,
    ends_s: Floats,
    step_s: float,
    seen: Integers,
    marks: Integers,
) -> tuple[_Neighbours, int, int]:
    """What is one change away, not seen, within the limits, and could run if sends did not block.

    How many these are, and how many were replayed to find out, come with them.
    """
    first, slots = search.first, search.slots
    longest = 0
    for worker in range(len(first) - 1):
        longest = max(longest, first[worker + 1] - first[worker])
    # Of a block no more than four changes for each operation of its worker are tried.
    rows = np.empty((4 * longest, longest), np.int64)
    found = _room_for(64, longest)
    count = replayed = 0
    trial = present.copy()
    trial_starts_s, trial_ends_s = np.zeros(len(starts_s)), np.empty(len(starts_s))
    waiting = np.full(len(starts_s), -1)
    code = 0
    while ends_s[code] != step_s:
        code += 1
    while code >= 0:
        worker = slots[code % len(slots)].worker
        order = present[first[worker] : first[worker + 1]]
        begin = 0
        while order[begin] != code:
            begin += 1
        end = begin
        while begin and ends_s[order[begin - 1]] == starts_s[order[begin]]:
            begin -= 1
        changes = _moves(search, worker, order, begin, end, rows)
        changes = _exchanges(search, order, begin, rows, changes)
        if end > begin:
            changes = _exchanges(search, order, end, rows, changes)
        for row in _different(rows[:changes, : len(order)]):
            trial[first[worker] : first[worker + 1]] = rows[row, : len(order)]
            if not _is_seen(trial, seen, marks):
                changed = 0
                while rows[row, changed] == order[changed]:
                    changed += 1
                from_s = starts_s[order[changed]]
                _replay_changed(
                    search.operations, trial, first, from_s, starts_s, ends_s, waiting, trial_starts_s, trial_ends_s
                )
                replayed += 1
                end_s, sum_s = _last_ends(trial, first, trial_ends_s)
                if end_s >= 0:
                    if count == len(found.worker):
                        found = _grown(found)
                    found.orders[count, : len(order)] = rows[row, : len(order)]
                    found.worker[count] = worker
                    found.step_s[count], found.sum_s[count] = end_s, sum_s
                    count += 1
        trial[first[worker] : first[worker + 1]] = order
        code = search.operations[order[begin]].needs
    return found, count, replayed


@part_of_kernel
def _room_for(count: int, longest: int) -> _Neighbours:
    return _Neighbours(
        np.empty((count, longest), np.int64), np.empty(count, np.int64), np.empty(count), np.empty(count)
    )


@part_of_kernel
def _grown(found: _Neighbours) -> _Neighbours:
    """The same with twice as much room."""
    count, longest = found.orders.shape
    grown = _room_for(2 * count, longest)
    grown.orders[:count], grown.worker[:count] = found.orders, found.worker
    grown.step_s[:count], grown.sum_s[:count] = found.step_s, found.sum_s
    return grown


@lean_part
def _last_ends(codes: Integers, first: Integers, ends_s: Floats) -> tuple[float, float]:
    """The latest end of the last operations of workers, and the sum of them; -1 where somebody waits for ever."""
    step_s = sum_s = 0.0
    for worker in range(len(first) - 1):
        if first[worker + 1] > first[worker]:
            end_s = ends_s[codes[first[worker + 1] - 1]]
            if end_s < 0:
                return -1.0, 0.0
            step_s = max(step_s, end_s)
            sum_s += end_s
    return step_s, sum_s


@part_of_kernel
def _moves(search: _Search, worker: int, order: Integers, begin: int, end: int, rows: Integers) -> int:
    """An operation of the block goes to its front or to its end; returns how many rows that makes."""
    count = 0
    for source in range(begin, end + 1):
        for target in (begin, end):
            if source == target:
                continue
            low, high = (target, source - 1) if target < source else (source + 1, target)
            if _passes(search, order[source], order[low : high + 1]):
                row = rows[count, : len(order)]
                row[:] = order
                if target < source:
                    row[target + 1 : source + 1] = order[target:source]
                else:
                    row[source:target] = order[source + 1 : target + 1]
                row[target] = order[source]
                count += _is_within_limits(search, worker, row)
    return count


@part_of_kernel
def _exchanges(search: _Search, order: Integers, place: int, rows: Integers, count: int) -> int:
    """The operation at `place` changes places with one of its kind that comes before; that keeps any limit.

    Returns how many rows there are then.
    """
    later, kinds = order[place], len(search.slots)
    for other in range(place - 1, -1, -1):
        earlier = order[other]
        if _in_one_channel(search, later, earlier):
            break
        if earlier // kinds == later // kinds and _passes(search, earlier, order[other + 1 : place]):
            rows[count, : len(order)] = order
            rows[count, other], rows[count, place] = later, earlier
            count += 1
    return count


@lean_part
def _passes(search: _Search, moved: int, codes: Integers) -> bool:
    """Whether an operation may go past these."""
    for code in codes:
        if _in_one_channel(search, moved, code):
            return False
    return True


@lean_part
def _in_one_channel(search: _Search, one: int, other: int) -> bool:
    """Whether both receive, or both send, through one channel: messages must not change their order."""
    received, sent = search.received_in[one], search.sent_in[one]
    both_receive: bool = received >= 0 and received == search.received_in[other]
    both_send: bool = sent >= 0 and sent == search.sent_in[other]
    return both_receive or both_send


@lean_part
def _is_within_limits(search: _Search, worker: int, order: Integers) -> bool:
    """Whether a worker that runs `order` never has more in flight, or keeps more, than it may."""
    count = len(search.slots)
    room, kept = search.in_flight[worker], search.kept[worker]
    for code in order:
        if code < count:
            room -= 1
            kept -= 1
            if room < 0 or kept < 0:
                return False
        elif code < 2 * count:
            room += 1
            if not search.split:
                kept += 1
        else:
            kept += 1
    return True


@part_of_kernel
def _different(rows: Integers) -> Integers:
    """The numbers of the different rows, in the order of their contents."""
    found = np.empty(len(rows), np.int64)
    count = 0
    for row in range(len(rows)):
        place, high = 0, count
        # Most of two rows is equal, so to compare them takes long.
        while place < high:
            middle = (place + high) // 2
            if _compared(rows[found[middle]], rows[row]) < 0:
                place = middle + 1
            else:
                high = middle
        if place < count and _compared(rows[found[place]], rows[row]) == 0:
            continue
        for other in range(count, place, -1):
            found[other] = found[other - 1]
        found[place] = row
        count += 1
    return found[:count]


@lean_part
def _compared(one: Integers, other: Integers) -> int:
    """Negative if `one` comes before, zero if they are equal."""
    for place in range(len(one)):
        if one[place] != other[place]:
            return int(one[place] - other[place])
    return 0


@part_of_kernel
def _is_seen(codes: Integers, seen: Integers, marks: Integers) -> bool:
    mark = _mark(codes)
    for state in range(len(seen)):
        if marks[state] == mark and _compared(seen[state], codes) == 0:
            return True
    return False


@part_of_kernel
def _best_that_runs(search: _Search, present: Integers, neighbours: _Neighbours, count: int) -> int:
    """The first of the best neighbours whose orders can run when sends block, or -1."""
    first = search.first
    tried = np.zeros(count, np.int64)
    for _ in range(count):
        best = -1
        for each in range(count):
            if not tried[each] and (best < 0 or _is_better(neighbours, each, best)):
                best = each
        tried[best] = 1
        codes = present.copy()
        _change(codes, first, neighbours, best)
        if _can_run(search, codes):
            return best
    return -1


@lean_part
def _is_better(neighbours: _Neighbours, one: int, other: int) -> bool:
    one_s, other_s = neighbours.step_s[one], neighbours.step_s[other]
    better: bool = one_s < other_s or (one_s == other_s and neighbours.sum_s[one] < neighbours.sum_s[other])
    return better


@part_of_kernel
def _change(codes: Integers, first: Integers, neighbours: _Neighbours, chosen: int) -> None:
    """Make the change that leads to a neighbour."""
    worker = neighbours.worker[chosen]
    codes[first[worker] : first[worker + 1]] = neighbours.orders[chosen, : first[worker + 1] - first[worker]]


@part_of_kernel
def _can_run(search: _Search, codes: Integers) -> bool:
    """Whether the orders come to their end when channels hold one message, as `check_program` asks."""
    first, channels = search.first, search.channels
    num_workers = len(first) - 1
    # The operation that needs the message in a channel, or -1.
    content = np.full(len(channels), -1)
    place = first[:-1].copy()
    sending = np.zeros(num_workers, np.bool_)
    # Whoever is waited for comes again; one that is there already need not come twice.
    active, is_active = np.arange(num_workers), np.ones(num_workers, np.bool_)
    left = num_workers
    while left:
        left -= 1
        worker = active[left]
        is_active[worker] = False
        while place[worker] < first[worker + 1]:
            code = codes[place[worker]]
            other = -1
            if not sending[worker]:
                channel = search.received_in[code]
                if channel >= 0:
                    if content[channel] != code:
                        break
                    content[channel] = -1
                    other = channels[channel].sender
                sending[worker] = True
                if other >= 0 and not is_active[other]:
                    active[left], is_active[other] = other, True
                    left += 1
            channel = search.sent_in[code]
            if channel >= 0:
                if content[channel] >= 0:
                    break
                content[channel] = search.sent_for[code]
                other = channels[channel].receiver
                if not is_active[other]:
                    active[left], is_active[other] = other, True
                    left += 1
            sending[worker] = False
            place[worker] += 1
    return bool((place == first[1:]).all())
