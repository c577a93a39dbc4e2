"""Search: the plan of least step time for the live workers, and a proof of how good it is."""

from __future__ import annotations

from chameleon_ft.search.detours import reroute, shared_hops
from chameleon_ft.search.find import find_plan, find_plan_of_sizes
from chameleon_ft.search.infeasible import InfeasibleError
from chameleon_ft.search.recut import recut_plan
from chameleon_ft.search.result import DEFAULT_EFFORT, FoundPlan, SearchResult, SizeFigures, pareto_front

__all__ = [
    "DEFAULT_EFFORT",
    "FoundPlan",
    "InfeasibleError",
    "SearchResult",
    "SizeFigures",
    "find_plan",
    "find_plan_of_sizes",
    "pareto_front",
    "recut_plan",
    "reroute",
    "shared_hops",
]
