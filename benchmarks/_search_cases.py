"""Shared parts of `benchmarks.search`: the result of a part, and the clusters of the presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks._common import Bar
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.schedule import CostModel

DEVICE: Final = "h100-80g"
MODELS: Final = ("llama2-7b", "llama2-13b", "llama3-8b", "qwen2.5-7b")
"""Presets of which a worker with one device can hold a few blocks."""

_MICRO_BATCHES_PER_WORKER: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """The result of a part: rows of (question, median and extremes, remarks), bars and raw data."""

    rows: tuple[tuple[str, str, str], ...]
    bars: tuple[Bar, ...]
    results: Mapping[str, Any]


def spread_losses(workers: int, count: int) -> tuple[int, ...]:
    """Return `count` of the workers, evenly spread over hosts and stages."""
    return tuple(range(0, workers, max(1, workers // count)))[:count]


def preset_costs(model: str, workers: int, lost: tuple[int, ...] = (), *, gradients: bool = True) -> CostModel:
    """Return a preset on hosts of eight without the lost workers; without `gradients`, gradient sync is free."""
    rates = device(DEVICE)
    workload = derive_workload(
        model_shape(model), rates, micro_batch_size=1, micro_batches=_MICRO_BATCHES_PER_WORKER * workers
    )
    if not gradients:
        layers = tuple(dataclasses.replace(layer, gradient_bytes=0) for layer in workload.layers)
        workload = dataclasses.replace(workload, layers=layers)
    return CostModel(workload, rates.cluster(workers, workers_per_host=8).without(lost))
