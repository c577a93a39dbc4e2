"""Published planners, to compare our search with: they share with it only what places, schedules and replays plans."""

from __future__ import annotations

from chameleon_ft.search.baselines.oobleck import (
    PipelineTemplate,
    oobleck_plan,
    pipeline_templates,
    reconfigured_pipelines,
)
from chameleon_ft.search.baselines.paper import paper_plan
from chameleon_ft.search.baselines.planned_layouts import BaselinePlan, equal_layouts

__all__ = [
    "BaselinePlan",
    "PipelineTemplate",
    "equal_layouts",
    "oobleck_plan",
    "paper_plan",
    "pipeline_templates",
    "reconfigured_pipelines",
]
