"""A generation that is prepared while an earlier one trains, and what moves in those before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.transfer import Transfer

__all__ = ["Migrated", "NextGeneration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGeneration:
    """The generation that the run is to switch to, until it is in force or given up."""

    number: int
    plan: ActivePlan
    unprepared: frozenset[int]  # participants that have not answered yet
    deadline_s: float  # end of the wait for the answers, in monotonic seconds
    prepared_at: float = 0.0  # when the last one did, in Unix seconds; 0 before
    is_switching: bool = False  # whether the workers were told to switch to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """Layers that have moved during training on the way to a plan, in waves."""

    waves: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def after(self, wave: Transfer | None, seconds: float) -> Self:
        """Return the sum with one more wave; None if no layer moved before this switch."""
        if wave is None:
            return self
        return replace(
            self,
            waves=self.waves + 1,
            seconds=self.seconds + seconds,
            num_bytes=self.num_bytes + wave.total_bytes,
        )
