"""Runs on emulated devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chameleon_ft.cluster import Link
from chameleon_ft.config import STAND_IN_JOB, Batch, Checkpoint, Parallel, RunConfig, Snapshots, Timelines
from chameleon_ft.cost.profile import Fingerprint, Profile
from chameleon_ft.storage.profiles import write_profile
from chameleon_ft.workload import LayerCost
from tests.harness import PATIENT

LAYERS = tuple(
    LayerCost(f"layer {n}", 0.004, 0.004, 0.002, output_bytes=1 << 20, gradient_bytes=4 << 20, param_bytes=4 << 20)
    for n in range(5)
)


def emulated_config(folder: Path, **changes: Any) -> RunConfig:
    profile = Profile(
        name="five layers",
        fingerprint=Fingerprint(
            model="five", micro_batch_size=2, dtype="bf16", device="a device", threads=0, versions={}
        ),
        source="derived",
        provenance="by hand",
        layers=LAYERS,
        intra_host=Link(1e-5, 1e10),
    )
    write_profile(profile, folder / "profile.json")
    fields: dict[str, Any] = {
        "job": STAND_IN_JOB,
        "device": "emulated",
        "profile": folder / "profile.json",
        "workers": 4,
        "steps": 8,
        "parallel": Parallel(dp=2, pp=2, optimizer_redundancy="all"),
        "batch": Batch(micro_batches=8, micro_batch_size=2),
        "timeouts": PATIENT,
        "timelines": Timelines(every=2),
        "checkpoint": Checkpoint(every=0),
        "snapshots": Snapshots(every=0),
    }
    return RunConfig(**{**fields, **changes})
