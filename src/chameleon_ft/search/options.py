"""Effort of a search, after which it settles for the best plan so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule.best import DEFAULT_EFFORT as PROGRAM_EFFORT

DEFAULT_EFFORT: Final = 160_000
"""Approximate number of operations to schedule before a search settles; a few tenths of a second."""

# Effort that completes most small searches: bounds rule out all but some hundreds of pipelines.
_COMPLETE: Final = 250 * PROGRAM_EFFORT
# A search is small if all its pipelines have at most this many hops for each operation that may be scheduled.
_SMALL: Final = 100_000
# Operations for a first look at a pipeline: enough for a few list-scheduling heuristics.
_LOOK: Final = 20_000
# With limited effort, a schedule this close to its lower bound is good enough.
_SLACK: Final = 5e-4
# A pipeline with more operations than this share of the effort is too expensive to look at first.
_EXPENSIVE: Final = 3 / 4


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        effort: approximate number of operations to schedule.
        least_holders: least number of holders of every layer.
        complete: whether to continue until no plan can be better, within `effort`.
        polish_effort: operations to schedule for a pipeline that will run.
    """

    effort: float = DEFAULT_EFFORT
    least_holders: int = 1
    complete: bool = False
    polish_effort: int = PROGRAM_EFFORT

    @classmethod
    def of(cls, effort: float | None, *, least_holders: int = 1) -> SearchOptions:
        """Return options of a search with this effort; complete, however long it takes, if it is None."""
        return cls(math.inf if effort is None else effort, least_holders, complete=effort is None)

    @property
    def small(self) -> float:
        """Hops that all pipelines of a search may have for a complete search to be worth trying."""
        return self.effort * _SMALL

    def completed(self) -> SearchOptions:
        """Return options of the complete search that follows a small search."""
        return replace(self, effort=max(self.effort, _COMPLETE), complete=True)

    @property
    def slack(self) -> float:
        """Share by which a good enough schedule may exceed its lower bound."""
        return ROUNDING if self.complete else _SLACK

    @property
    def look_effort(self) -> int:
        """Operations to schedule in order to estimate a pipeline."""
        return PROGRAM_EFFORT if self.complete else _LOOK

    def is_expensive(self, depth: int, micro_batches: float) -> bool:
        """Return whether scheduling such a pipeline takes too much of the effort for a first look."""
        return not self.complete and depth * micro_batches > max(self.effort, DEFAULT_EFFORT) * _EXPENSIVE
