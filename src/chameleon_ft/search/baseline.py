"""What a published planner chooses."""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_ft.search.result import FoundPlan

__all__ = ["BaselinePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinePlan:
    """The plan that a published planner chooses.

    Attributes:
        found: the plan, with what is predicted of it here.
        estimate_s: seconds by the planner's own estimate, which is what it was chosen by.
    """

    found: FoundPlan
    estimate_s: float
