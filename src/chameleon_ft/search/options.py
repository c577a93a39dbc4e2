"""How much a search does before it settles for the best plan so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule.best import DEFAULT_EFFORT as PROGRAM_EFFORT

__all__ = ["DEFAULT_EFFORT", "SearchOptions"]

DEFAULT_EFFORT: Final = 160_000
"""About how many operations a search may schedule before it settles for what it has; some tenths of a second."""

# Effort that completes most small searches: bounds rule out all but some hundreds of pipelines.
_COMPLETE: Final = 250 * PROGRAM_EFFORT
# A search is small if all its pipelines have at most this many hops for each operation that may be scheduled.
_SMALL: Final = 100_000
# A first look at a pipeline: the few list-scheduling heuristics that so many operations allow.
_LOOK: Final = 20_000
# With little effort, a schedule so close to its lower bound is good enough.
_SLACK: Final = 5e-4
# A pipeline with more operations than this share of the effort is too expensive to look at first.
_EXPENSIVE: Final = 3 / 4


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        effort: operations to schedule, about.
        two_holders: whether every layer has to have two holders.
        complete: whether to go on until nothing can be better, as far as `effort` goes.
        polish_effort: operations that may be scheduled for a pipeline that will be run.
    """

    effort: float = DEFAULT_EFFORT
    two_holders: bool = False
    complete: bool = False
    polish_effort: int = PROGRAM_EFFORT

    @classmethod
    def of(cls, effort: float | None, *, two_holders: bool = False) -> SearchOptions:
        """Return options of a search with so much effort; complete, however long it takes, if that is None."""
        return cls(math.inf if effort is None else effort, two_holders, complete=effort is None)

    @property
    def small(self) -> float:
        """Hops that all pipelines of a search may have for a complete search to be worth trying."""
        return self.effort * _SMALL

    def completed(self) -> SearchOptions:
        """Return options of the complete search that follows if a search is small."""
        return replace(self, effort=max(self.effort, _COMPLETE), complete=True)

    @property
    def slack(self) -> float:
        """The share by which a schedule may be longer than its lower bound to be good enough."""
        return ROUNDING if self.complete else _SLACK

    @property
    def look_effort(self) -> int:
        """Operations that may be scheduled to estimate a pipeline."""
        return PROGRAM_EFFORT if self.complete else _LOOK

    def is_expensive(self, depth: int, micro_batches: float) -> bool:
        """Return whether a schedule of such a pipeline takes too much of the effort to look at it first."""
        return not self.complete and depth * micro_batches > max(self.effort, DEFAULT_EFFORT) * _EXPENSIVE
