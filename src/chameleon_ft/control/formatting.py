"""Plans in words, for banners and records."""

from __future__ import annotations

from collections import Counter

from chameleon_ft.plan import Plan
from chameleon_ft.plan.detours import disjoint_pipelines
from chameleon_ft.quantities import counted

__all__ = ["describe_pipelines"]


def describe_pipelines(plan: Plan) -> str:
    """Write "4 pipelines of 2 stages", or "3 pipelines: 2 of 3 stages, 1 of 1 stage; 2 detours".

    A detour is a way that is no pipeline of its own.
    """
    pipelines = disjoint_pipelines(plan)
    depths = sorted(Counter(map(len, pipelines)).items(), key=lambda item: (-item[1], -item[0]))
    each = [f"{count} of {counted(depth, 'stage')}" for depth, count in depths]
    total = counted(len(pipelines), "pipeline")
    words = f"{total} of {counted(depths[0][0], 'stage')}" if len(depths) == 1 else f"{total}: {', '.join(each)}"
    detours = len({route.hops for route in plan.routes}) - len(pipelines)
    return f"{words}; {counted(detours, 'detour')}" if detours else words
