"""The best schedule of a network as far as an effort goes: list scheduling under heuristics, then local search.

There are two neighbourhoods. Where routes differ, micro-batches change their priority, and the list scheduler does the
rest: messages between two workers keep their order, so the order on one worker binds the next, and no change on a
single worker is better. Then operations on the critical path change places. The critical path consists of blocks,
operations that follow each other without idle time on one worker; a neighbour moves an operation to the front or to
the end of its block (as in job-shop scheduling: Dell'Amico and Trubian 1993), or exchanges two operations of one kind:
under tight limits a forward is late because another one took its room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from chameleon_ft.schedule._network import Network
from chameleon_ft.schedule._records import Integers
from chameleon_ft.schedule.heuristics import ROUNDING, ListSchedules, Problem
from chameleon_ft.schedule.list_scheduler import Schedule, replayed, schedule

__all__ = ["best_schedule", "reordered", "reprioritized"]

# Shares of the effort that go into heuristics and, where routes share stages, into priorities; what a replay of an
# operation costs, if scheduling one costs 1.
_HEURISTICS: Final = 1 / 2
_PRIORITIES: Final = 1 / 4
_REPLAY: Final = 1 / 7

# On networks so large that a search could try fewer candidates there is none: there a list schedule alone is close to
# the lower bound.
_LEAST_SCHEDULES: Final = 50
_LEAST_REPLAYS: Final = 100

# By how many places the priority of a micro-batch is raised or lowered, besides to the highest and to the lowest.
_STEPS: Final = (2, 4)

# The first slots of routes by priority.
_Ways = tuple[int, ...]


def best_schedule(problem: Problem, *, effort: float, slack: float = ROUNDING) -> Schedule:
    """The best schedule that is found.

    Args:
        problem: what to schedule.
        effort: how many operations may be scheduled; replaying one counts a seventh. Some heuristics are always tried.
        slack: a step time that is longer than the lower bound by this share is good enough.
    """
    listed = ListSchedules(problem, slack=slack)
    found, enough_s = listed.search(effort * _HEURISTICS), listed.enough_s
    if found.beyond_limits or found.step_s <= enough_s:
        return found
    priorities = _PRIORITIES if problem.shared else 0.0
    found = reprioritized(problem.network, found, enough_s=enough_s, effort=effort * priorities)
    replays = effort * (1 - _HEURISTICS - priorities) / _REPLAY
    shorter = reordered(problem.network, found, problem.largest(), enough_s=enough_s, effort=replays)
    return shorter if shorter.step_s < found.step_s * (1 - ROUNDING) else found


def reprioritized(network: Network, found: Schedule, *, enough_s: float, effort: float) -> Schedule:
    """A schedule under the rules of `found`, whose priorities are the usual ones, that takes no longer.

    Takes the first improvement until there is none, the time is `enough_s`, or `effort` operations have been scheduled.
    """
    trials = int(effort) // len(network.operations)
    if trials < _LEAST_SCHEDULES:
        return found
    best, ways = found, tuple(network.ways.tolist())
    seen = {ways}
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(ways):
            if trials == 0 or best.step_s <= enough_s:
                return best
            if neighbour in seen:
                continue
            seen.add(neighbour)
            trials -= 1
            trial = schedule(network, found.rules, np.array(neighbour))
            if trial.step_s < best.step_s and not trial.beyond_limits:
                best, ways, improved = trial, neighbour, True
                break
    return best


def _neighbours(ways: _Ways) -> Iterator[_Ways]:
    """One route gets the highest or lowest priority, or one some places higher or lower."""
    last = len(ways) - 1
    for place, way in enumerate(ways):
        rest = ways[:place] + ways[place + 1 :]
        targets = (0, *(place - step for step in reversed(_STEPS)), *(place + step for step in _STEPS), last)
        for target in targets:
            if 0 <= target <= last and target != place:
                yield (*rest[:target], way, *rest[target:])


def reordered(network: Network, found: Schedule, limits: Integers, *, enough_s: float, effort: float) -> Schedule:
    """A schedule within `limits`, int64 [3, workers], that takes no longer than `found`, which must be within them too.

    Tabu search: goes to the best neighbour that has not been visited, even if it takes longer, and returns the best
    schedule of all. Ends at `enough_s`, without such a neighbour, or when `effort` operations have been replayed.
    """
    if len(network.operations) * _LEAST_REPLAYS > effort:
        return found
    # Imported here, as everywhere: importing a kernel loads numba, and most users of this module run none.
    from chameleon_ft.schedule._kernels.replay import Neighbourhood, changed, replay_neighbours

    received_in, sent_in = _channels_of_operations(network)
    workers = np.ascontiguousarray(network.slots["worker"])
    of = Neighbourhood(workers, network.operations, received_in, sent_in, network.first, limits, network.split_backward)
    present = best = found.codes
    best_s = found.step_s
    visited = {present.tobytes()}
    operations = 0
    while best_s > enough_s and operations < effort:
        changes, steps_s, sums_s = replay_neighbours(of, present)
        operations += (1 + len(changes)) * len(present)
        # Of neighbours that take equally long, the one with the lowest sum of the workers' ends comes first.
        for number in np.lexsort((sums_s, steps_s)).tolist():
            neighbour = changed(present, *changes[number].tolist())
            if neighbour.tobytes() not in visited and _can_run(network, received_in, sent_in, neighbour):
                break
        else:
            break
        present = neighbour
        visited.add(present.tobytes())
        if steps_s[number] < best_s:
            best, best_s = present, float(steps_s[number])
    return replayed(network, replace(found.rules, limits=limits), best)


def _channels_of_operations(network: Network) -> tuple[Integers, Integers]:
    """By code, the channel that an operation receives from, and the one that it sends into; -1 for none."""
    slots, count = network.slots, len(network.slots)
    received_in, sent_in = np.full(len(network.operations), -1), np.full(len(network.operations), -1)
    # Slots whose activation goes to another worker, from which its gradient comes back.
    sender = np.flatnonzero(~slots["last"][:-1] & (slots["worker"][:-1] != slots["worker"][1:]))
    sent_in[sender] = received_in[sender + 1] = slots["down"][sender]
    sent_in[count + sender + 1] = received_in[count + sender] = slots["up"][sender + 1]
    return received_in, sent_in


def _can_run(network: Network, received_in: Integers, sent_in: Integers, codes: Integers) -> bool:
    """Whether these orders end if channels hold one message, as `check_program` asks."""
    from chameleon_ft.schedule._kernels.replay import run_blocking

    senders, receivers = (np.ascontiguousarray(network.channels[name]) for name in ("sender", "receiver"))
    reached, _ = run_blocking(network.first, received_in[codes], sent_in[codes], senders, receivers)
    return bool((reached == network.first[1:]).all())
