"""Shapes of published models, rates of known devices, and the workloads that follow from them."""

from __future__ import annotations

from chameleon_ft.presets.derive import TokenWork, derive_workload, layer_work
from chameleon_ft.presets.devices import DEVICES, Device, device
from chameleon_ft.presets.execution import (
    PRECISIONS,
    STATE_POLICIES,
    Attention,
    DType,
    Execution,
    Recompute,
    StatePolicy,
    state_policy,
)
from chameleon_ft.presets.models import MODELS, from_hugging_face, model_shape
from chameleon_ft.presets.shape import Bias, FeedForward, ModelShape, Norm

__all__ = [
    "DEVICES",
    "MODELS",
    "PRECISIONS",
    "STATE_POLICIES",
    "Attention",
    "Bias",
    "DType",
    "Device",
    "Execution",
    "FeedForward",
    "ModelShape",
    "Norm",
    "Recompute",
    "StatePolicy",
    "TokenWork",
    "derive_workload",
    "device",
    "from_hugging_face",
    "layer_work",
    "model_shape",
    "state_policy",
]
