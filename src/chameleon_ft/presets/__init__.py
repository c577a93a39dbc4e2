"""What published models cost on known devices: shapes, rates, and the workloads that follow from them."""

from __future__ import annotations

from chameleon_ft.presets.derive import derive_workload
from chameleon_ft.presets.devices import DEVICES, Device, device
from chameleon_ft.presets.dtypes import STATE_POLICIES, DType, StatePolicy, state_policy
from chameleon_ft.presets.execution import Attention, Execution, Recompute
from chameleon_ft.presets.flops import TokenWork, layer_work, model_flops_per_token
from chameleon_ft.presets.hugging_face import from_hugging_face
from chameleon_ft.presets.models import MODELS, model_shape
from chameleon_ft.presets.shape import Bias, FeedForward, ModelShape, Norm

__all__ = [
    "DEVICES",
    "MODELS",
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
    "model_flops_per_token",
    "model_shape",
    "state_policy",
]
