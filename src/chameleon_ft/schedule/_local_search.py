"""Shorter orders from good ones: operations on the longest path change places.

A step gets shorter only if its longest path does. That path is made of blocks: operations which follow each other
without a pause on one worker. The neighbours of a schedule are those in which an operation goes to the front or to the
end of its block (as in job-shop scheduling: Dell'Amico and Trubian 1993), or changes places with one of its kind that
comes before: where limits are tight, a forward is too late because another took the room. The search goes on from the
best neighbour, also where that is longer than what it came from, but to none that it has been at, and keeps the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.schedule._engine import Rules, Schedule
from chameleon_ft.schedule._longest_path import longest_path
from chameleon_ft.schedule._network import Network

# In plans so large that a search would hardly begin, there is none; there a list schedule alone is close to the bound.
_LEAST_REPLAYS: Final = 100

_Orders = tuple[tuple[int, ...], ...]


def shortened(network: Network, found: Schedule, rules: Rules, *, enough_s: float, effort: int) -> Schedule:
    """A schedule that takes no longer than `found` and keeps within the limits of `rules`, as `found` must.

    The search ends at `enough_s`, when there is nothing left to try, or when `effort` operations have been
    replayed.
    """
    search = _Search(network, rules)
    if search.num_codes * _LEAST_REPLAYS > effort:
        return found
    present = best = search.timed(tuple(map(tuple, found.orders)))
    seen = {present.orders}
    while best.step_s > enough_s and search.replayed < effort:
        neighbours = sorted(search.neighbours(present, seen), key=lambda neighbour: (neighbour.step_s, neighbour.sum_s))
        following = next((neighbour for neighbour in neighbours if search.can_run(neighbour.orders)), None)
        if following is None:
            break
        present = following
        seen.add(present.orders)
        if present.step_s < best.step_s:
            best = present
    return replace(found, orders=list(map(list, best.orders)), step_s=best.step_s)


@dataclass(frozen=True, slots=True)
class _Timed:
    """Orders with the times of their replay, by code; an end of -1 says that they wait for each other.

    Of two steps that are equally long, the better is that with the lower sum of the workers' ends.
    """

    orders: _Orders
    starts_s: list[float]
    ends_s: list[float]
    step_s: float
    sum_s: float


class _Search:
    """What may be done with the orders of a network; `replayed` counts operations."""

    def __init__(self, network: Network, rules: Rules) -> None:
        self.replayed = 0
        self.num_codes = len(network.dependencies.needs)
        self._dependencies = network.dependencies
        self._count = len(network.slots.worker)
        self._split = network.split_backward
        self._worker = network.slots.worker * (3 if self._split else 2)
        self._in_flight = rules.in_flight
        self._kept = rules.kept
        self._channels = network.channels
        self._messages = _messages(network)

    def timed(self, orders: _Orders) -> _Timed:
        starts_s, ends_s = longest_path(orders, self._dependencies)
        self.replayed += self.num_codes
        last_s = sum(ends_s[order[-1]] for order in orders if order)
        return _Timed(orders, starts_s, ends_s, max(ends_s), last_s)

    def neighbours(self, present: _Timed, seen: set[_Orders]) -> Iterator[_Timed]:
        """What is one change away, not seen, within the limits, and could run if sends did not block."""
        for worker, first, last in self._blocks(present):
            order = present.orders[worker]
            changes = [*self._moves(worker, order, first, last)]
            for place in {first, last}:
                changes += self._exchanges(order, place)
            for changed in sorted(set(changes)):
                orders = (*present.orders[:worker], changed, *present.orders[worker + 1 :])
                if orders not in seen:
                    found = self.timed(orders)
                    if min(found.ends_s) >= 0:
                        yield found

    def _blocks(self, present: _Timed) -> Iterator[tuple[int, int, int]]:
        """Worker, first and last place of each block of the longest path, from its end to its start."""
        starts_s, ends_s = present.starts_s, present.ends_s
        code = ends_s.index(present.step_s)
        while code >= 0:
            worker = self._worker[code]
            order = present.orders[worker]
            first = last = order.index(code)
            while first and ends_s[order[first - 1]] == starts_s[order[first]]:
                first -= 1
            yield worker, first, last
            code = self._dependencies.needs[order[first]]

    def _moves(self, worker: int, order: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, ...]]:
        """An operation of the block goes to its front or to its end."""
        for source in range(first, last + 1):
            moved, rest = order[source], order[:source] + order[source + 1 :]
            for target in (first, last):
                passed = order[target:source] if target < source else order[source + 1 : target + 1]
                if passed and not any(self._in_one_channel(moved, code) for code in passed):
                    changed = (*rest[:target], moved, *rest[target:])
                    if self._within_limits(worker, changed):
                        yield changed

    def _exchanges(self, order: tuple[int, ...], place: int) -> Iterator[tuple[int, ...]]:
        """The operation at `place` changes places with one of its kind that comes before; that keeps any limit."""
        later = order[place]
        for other in range(place - 1, -1, -1):
            earlier, between = order[other], order[other + 1 : place]
            if self._in_one_channel(later, earlier):
                return
            same_kind = earlier // self._count == later // self._count
            if same_kind and not any(self._in_one_channel(earlier, code) for code in between):
                yield (*order[:other], later, *between, earlier, *order[place + 1 :])

    def _in_one_channel(self, one: int, other: int) -> bool:
        """Whether both receive, or both send, through one channel: messages must not change their order."""
        received_in, sent_in = self._messages.received_in, self._messages.sent_in
        return 0 <= received_in[one] == received_in[other] or 0 <= sent_in[one] == sent_in[other]

    def _within_limits(self, worker: int, order: tuple[int, ...]) -> bool:
        """Whether a worker that runs `order` never has more in flight, or keeps more, than it may."""
        count = self._count
        room, kept = self._in_flight[worker], self._kept[worker]
        for code in order:
            if code < count:
                room -= 1
                kept -= 1
                if room < 0 or kept < 0:
                    return False
            elif code < 2 * count:
                room += 1
                kept += not self._split
            else:
                kept += 1
        return True

    def can_run(self, orders: _Orders) -> bool:
        """Whether the orders come to their end when channels hold one message, as `check_program` asks."""
        messages = self._messages
        content = [-1] * len(self._channels)
        position = [0] * len(orders)
        sending = [False] * len(orders)
        active = list(range(len(orders)))
        while active:
            worker = active.pop()
            order = orders[worker]
            while position[worker] < len(order):
                code = order[position[worker]]
                if not sending[worker]:
                    channel = messages.received_in[code]
                    if channel >= 0:
                        if content[channel] != code:
                            break
                        content[channel] = -1
                        active.append(self._channels[channel].sender)
                    sending[worker] = True
                channel = messages.sent_in[code]
                if channel >= 0:
                    if content[channel] >= 0:
                        break
                    content[channel] = messages.sent_for[code]
                    active.append(self._channels[channel].receiver)
                sending[worker] = False
                position[worker] += 1
        return all(done == len(order) for done, order in zip(position, orders, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Messages:
    """Lists by code: the channel through which an operation receives, that through which it sends, and the operation
    that needs what it sends; -1 where there is none.
    """

    received_in: list[int]
    sent_in: list[int]
    sent_for: list[int]


def _messages(network: Network) -> _Messages:
    slots, count = network.slots, len(network.slots.worker)
    none = [-1] * len(network.dependencies.needs)
    found = _Messages(received_in=none.copy(), sent_in=none.copy(), sent_for=none.copy())
    for slot in range(count - 1):
        if slots.last[slot] or slots.worker[slot] == slots.worker[slot + 1]:
            continue
        # Between this slot and the next on its route: the activation down, and its gradient up.
        for sender, receiver, channel in (
            (slot, slot + 1, slots.down[slot]),
            (count + slot + 1, count + slot, slots.up[slot + 1]),
        ):
            found.sent_in[sender] = found.received_in[receiver] = channel
            found.sent_for[sender] = receiver
    return found
