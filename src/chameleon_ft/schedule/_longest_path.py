"""The longest path through the operations of a step: each starts when its worker is free and what it needs is there.

Operations are numbers here, so that one loop does for programs and for what the scheduler is still making.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What operations need and how long they take, by their numbers.

    Attributes:
        needs: the operation that has to end before, besides those of the same worker; -1 where there is none. One that
            never runs is written as the operation's own number.
        delay_s: seconds that a message from there takes.
        duration_s: seconds that the operation takes.
    """

    needs: Sequence[int]
    delay_s: Sequence[float]
    duration_s: Sequence[float]


def longest_path(orders: Sequence[Sequence[int]], dependencies: Dependencies) -> tuple[list[float], list[float]]:
    """Start and end of each operation by its number, in seconds, when every worker runs its own in the order given.

    An operation that is in no order, or that waits for ever, ends at -1.
    """
    needs, delay_s, duration_s = dependencies.needs, dependencies.delay_s, dependencies.duration_s
    starts_s = [0.0] * len(needs)
    ends_s = [-1.0] * len(needs)
    position = [0] * len(orders)
    free_s = [0.0] * len(orders)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(orders)))
    while runnable:
        worker = runnable.pop()
        order, now = orders[worker], free_s[worker]
        for index in range(position[worker], len(order)):
            number = order[index]
            needed = needs[number]
            if needed >= 0:
                there_s = ends_s[needed]
                if there_s < 0:
                    waiting.setdefault(needed, []).append(worker)
                    position[worker] = index
                    break
                there_s += delay_s[number]
                if there_s > now:
                    now = there_s
            starts_s[number] = now
            now += duration_s[number]
            ends_s[number] = now
            if number in waiting:
                runnable += waiting.pop(number)
        free_s[worker] = now
    return starts_s, ends_s
