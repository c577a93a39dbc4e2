"""Plans: where the layers are and the route of each micro-batch through them."""

from __future__ import annotations

from chameleon_ft.plan.layouts import PipelineLayout, data_pipeline_plan, pipelines_plan, split_layers
from chameleon_ft.plan.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route

__all__ = [
    "Hop",
    "LayerRange",
    "PipelineLayout",
    "Placement",
    "Plan",
    "RecomputedLayers",
    "Route",
    "data_pipeline_plan",
    "pipelines_plan",
    "split_layers",
]
