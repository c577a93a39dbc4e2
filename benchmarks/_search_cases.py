"""What the parts of `benchmarks.search` share: what they hand back, and the clusters of the presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks._common import Bar
from chameleon_ft.presets import derive_workload, device, model_shape
from chameleon_ft.schedule import CostModel

__all__ = ["DEVICE", "MODELS", "PartReport", "preset_costs", "spread_losses"]

DEVICE: Final = "h100-80g"
MODELS: Final = ("llama2-7b", "llama2-13b", "llama3-8b", "qwen2.5-7b")
"""Presets that a worker of one device can hold a few blocks of."""

_MICRO_BATCHES_PER_WORKER: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What a part adds to the report: rows of (question, median and extremes, what else there is to say), and so on."""

    rows: tuple[tuple[str, str, str], ...]
    bars: tuple[Bar, ...]
    results: Mapping[str, Any]


def spread_losses(workers: int, count: int) -> tuple[int, ...]:
    """`count` of the workers, evenly spread over hosts and stages."""
    return tuple(range(0, workers, max(1, workers // count)))[:count]


def preset_costs(model: str, workers: int, lost: tuple[int, ...] = (), *, gradients: bool = True) -> CostModel:
    """A preset on hosts of eight, less those that are lost; gradient sync is free without `gradients`."""
    rates = device(DEVICE)
    workload = derive_workload(
        model_shape(model), rates, micro_batch_size=1, micro_batches=_MICRO_BATCHES_PER_WORKER * workers
    )
    if not gradients:
        layers = tuple(dataclasses.replace(layer, gradient_bytes=0) for layer in workload.layers)
        workload = dataclasses.replace(workload, layers=layers)
    return CostModel(workload, rates.cluster(workers, workers_per_host=8).without(lost))
