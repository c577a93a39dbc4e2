"""Profiles of published models on known devices, without running anything."""

from __future__ import annotations

from chameleon_ft.presets import STATE_POLICIES, Device, Execution, ModelShape, StatePolicy, derive_workload
from chameleon_ft.profiles.profile import Fingerprint, Profile

__all__ = ["derived_profile"]


def derived_profile(
    shape: ModelShape,
    device: Device,
    *,
    micro_batch_size: int,
    execution: Execution = Execution(),  # noqa: B008 - frozen
    state: StatePolicy = STATE_POLICIES["bf16-master"],
) -> Profile:
    """The profile of a model of this shape on this device, by `derive_workload`. Raises as that does."""
    workload = derive_workload(
        shape, device, micro_batch_size=micro_batch_size, micro_batches=1, execution=execution, state=state
    )
    return Profile(
        name=shape.name,
        fingerprint=Fingerprint(
            model=shape.name,
            micro_batch_size=micro_batch_size,
            dtype=str(state.parameters),
            device=device.name,
            threads=0,
            versions={},
        ),
        source="derived",
        provenance=(
            f"from the shape of {shape.name} and the rates of {device.name}, {execution.attention} attention, "
            f"recompute {execution.recompute}, state {state.name}; nothing was measured"
        ),
        layers=workload.layers,
        operation_overhead_s=workload.operation_overhead_s,
        intra_host=device.intra_host,
        inter_host=device.inter_host,
        memory_bytes=device.memory_bytes,
    )
