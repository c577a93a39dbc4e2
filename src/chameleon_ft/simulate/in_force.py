"""What planners share: which plan all hold, which was decided on, and the way back to a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from chameleon_ft.simulate.planner import Chosen, Option, Outlook, best_option

__all__ = ["PlanInForce"]

_P = TypeVar("_P")


class PlanInForce(ABC, Generic[_P]):
    """The frame of a decision; what ways there are to go on is up to the planner.

    A plan is reached when the change to it is complete. Until then, what all hold is the one before.
    """

    def __init__(self) -> None:
        # What all of its workers are known to hold; None where nothing is.
        self._reached: _P | None = None
        self._decided: _P | None = None

    def decide(self, outlook: Outlook) -> Chosen | None:
        """See `Planner`."""
        if not outlook.interrupted:
            self._reach(self._decided)
        self._lose(outlook.lost)
        options = [] if self._reached is None else self._options(self._reached, outlook)
        best = best_option(options or self._from_checkpoint(outlook), outlook.horizon_s)
        if best is None:
            self._reached = self._decided = None
            return None
        if best.from_checkpoint:
            self._reached = None
        return self._in_force(best)

    def _in_force(self, option: Option) -> Chosen:
        self._decided = option.plan
        return Chosen(option=option, used=self._used(option.plan))

    def _reach(self, plan: _P | None) -> None:
        self._reached = plan

    @abstractmethod
    def _lose(self, lost: frozenset[int]) -> None:
        """Workers have lost what they hold."""

    @abstractmethod
    def _used(self, plan: _P) -> frozenset[int]:
        """The workers of a plan."""

    @abstractmethod
    def _options(self, reached: _P, outlook: Outlook) -> Sequence[Option]:
        """The ways to go on from what is held."""

    @abstractmethod
    def _from_checkpoint(self, outlook: Outlook) -> Sequence[Option]:
        """The ways to begin anew where there is none."""
