"""The result of a published planner."""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_ft.search.result import FoundPlan

__all__ = ["BaselinePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinePlan:
    """The plan that a published planner chooses.

    Attributes:
        found: the plan, with this package's own prediction of it.
        estimate_s: seconds of a step by the planner's own estimate, which the plan was chosen by.
    """

    found: FoundPlan
    estimate_s: float
