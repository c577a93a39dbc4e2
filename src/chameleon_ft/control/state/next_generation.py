"""A generation that is prepared while an earlier one trains."""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_ft.control.state.active_plan import ActivePlan

__all__ = ["NextGeneration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGeneration:
    """The generation that the run is to switch to, until it is in force or given up."""

    number: int
    plan: ActivePlan
    unprepared: frozenset[int]  # participants that have not answered yet
    prepared_at: float = 0.0  # when the last one did, in Unix seconds; 0 before
    deadline_s: float | None = None  # end of the wait for the answers, in monotonic seconds; None: no limit
    is_switching: bool = False  # whether the workers were told to switch to it
    following: ActivePlan | None = None  # the plan to switch to once all layers have arrived, if they move in this one
