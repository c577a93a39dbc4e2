"""Search: the plan of least step time for the workers that are left, and a proof of how good it is."""

from __future__ import annotations

from chameleon_ft.search.find import DEFAULT_EFFORT, find_plan
from chameleon_ft.search.infeasible import InfeasibleError
from chameleon_ft.search.result import BoundFamily, FoundPlan, SearchResult

__all__ = ["DEFAULT_EFFORT", "BoundFamily", "FoundPlan", "InfeasibleError", "SearchResult", "find_plan"]
