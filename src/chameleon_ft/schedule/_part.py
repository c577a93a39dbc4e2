"""The best schedule of routes that have to do with each other, as far as an effort goes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import ge
from typing import Final

from chameleon_ft.plan.plan import Hop
from chameleon_ft.schedule._engine import Rules, Schedule
from chameleon_ft.schedule._local_search import shortened
from chameleon_ft.schedule._rank_search import reranked
from chameleon_ft.schedule._trials import ROUNDING, Trials

# Shares of the effort that go into trying rules and, where routes share stages, into the ranks of micro-batches; what a
# replay of an operation costs, when one that is scheduled costs 1.
RULES: Final = 1 / 2
_RANKS: Final = 1 / 4
REPLAY: Final = 1 / 7


class Part:
    """Schedules of the same routes: these ways, and for each route the index of the one that it takes.

    Attributes:
        tried: rules and what came of them, best first: schedules within the limits go before those that exceed one,
            then the shorter, then the one tried earlier.
        finished: whether nothing more is going to be tried.
    """

    def __init__(self, trials: Trials, ways: Sequence[tuple[Hop, ...]], taken: Sequence[int]) -> None:
        self._trials = trials
        self._ways = ways
        self._network = trials.network(ways, taken)
        self._enough_s = self._network.lower_bound_s() * (1 + ROUNDING)
        self._untried = trials.rules_to_try(ways)
        # Rules that led to dead ends, and those to try with only gradients run ahead when there are no others.
        self._dead_ends: list[Rules] = []
        self._strained = deque[Rules]()
        self.tried: list[tuple[Rules, Schedule]] = []
        self.finished = False
        self._try_next()

    @property
    def best(self) -> tuple[Rules, Schedule]:
        """What is best so far."""
        return self.tried[0]

    def try_rules(self, effort: float = math.inf, *, enough_s: float = 0.0) -> None:
        """Try rules until the time is `enough_s` or meets the lower bound, there are no more, or so many operations
        have been scheduled.
        """
        self.finished = True
        enough_s = max(enough_s, self._enough_s)
        while self._trials.operations < effort and not self._is_within(enough_s) and self._try_next():
            pass

    def _try_next(self) -> bool:
        rules = next(self._untried, None) or (self._strained.popleft() if self._strained else None)
        if rules is None:
            return False
        if any(all(map(ge, rules.in_flight, dead.in_flight)) for dead in self._dead_ends):
            rules = replace(rules, gradients_only=True)
        found = self._trials.run(self._network, rules)
        if found.dead_end:
            self._dead_ends.append(rules)
            rules = replace(rules, gradients_only=True)
        elif found.strained:
            self._strained.append(replace(rules, gradients_only=True))
        self.tried.append((rules, found))
        self.tried.sort(key=lambda trial: (trial[1].beyond_limits, trial[1].step_s))
        return True

    def finish(self, effort: float) -> None:
        """Try rules, then make the best schedule shorter where a search finds how.

        Micro-batches that do not all go one way are ranked anew under its rules. Then operations change places under
        the largest limits there are.
        """
        self.try_rules(effort * RULES)
        rules, found = self.best
        if found.beyond_limits or self._is_within(self._enough_s):
            return
        ranks = _RANKS if len(self._ways) > 1 else 0.0
        ranked = reranked(found, rules, enough_s=self._enough_s, effort=int(effort * ranks))
        largest = self._trials.largest(self._ways, rules)
        effort = int(effort * (1 - RULES - ranks) / REPLAY)
        shorter = shortened(ranked, largest, enough_s=self._enough_s, effort=effort)
        if shorter.step_s < ranked.step_s * (1 - ROUNDING):
            self.tried.insert(0, (largest, shorter))
        elif ranked is not found:
            self.tried.insert(0, (rules, ranked))

    def _is_within(self, enough_s: float) -> bool:
        found = self.best[1]
        return found.step_s <= enough_s and not found.beyond_limits
