"""Search: the plan of least step time for the live workers, and a proof of how good it is."""

from __future__ import annotations

from chameleon_ft.search.baselines.oobleck import oobleck_plan
from chameleon_ft.search.baselines.paper import paper_plan
from chameleon_ft.search.baselines.planned_layouts import BaselinePlan, equal_layouts
from chameleon_ft.search.detours import reroute, shared_hops
from chameleon_ft.search.find import find_plan, find_plan_of_sizes
from chameleon_ft.search.infeasible import InfeasibleError
from chameleon_ft.search.recut import recut_plan
from chameleon_ft.search.result import DEFAULT_EFFORT, BoundFamily, FoundPlan, SearchResult, SizeFigures, pareto_front

__all__ = [
    "DEFAULT_EFFORT",
    "BaselinePlan",
    "BoundFamily",
    "FoundPlan",
    "InfeasibleError",
    "SearchResult",
    "SizeFigures",
    "equal_layouts",
    "find_plan",
    "find_plan_of_sizes",
    "oobleck_plan",
    "paper_plan",
    "pareto_front",
    "recut_plan",
    "reroute",
    "shared_hops",
]
