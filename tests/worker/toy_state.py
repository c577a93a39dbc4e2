"""The state of a rank of the toy job, and what tests do with it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from chameleon_ft.job.job import Job
from chameleon_ft.plan import LayerRange
from chameleon_ft.storage.files import FaultLog
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.fault_injection import FaultInjector
from tests.worker.toy import SEED, toy_job

CPU = torch.device("cpu")
LAYERS = 5
WHOLE = LayerRange(0, LAYERS)


def held_layers(job: Job | None = None, layers: range = range(LAYERS)) -> HeldLayers:
    return HeldLayers(job or toy_job(LAYERS), layers, seed=SEED, device=CPU)


def no_faults(tmp_path: Path) -> FaultInjector:
    return FaultInjector(0, (), log=FaultLog(tmp_path / "faults.jsonl"), disconnect=lambda: None)


def set_gradients(held: HeldLayers, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in held.parameters(WHOLE):
        assert parameter.grad is not None
        parameter.grad.copy_(torch.randn(parameter.shape, generator=random))


def weights(held: HeldLayers, layers: LayerRange = WHOLE) -> list[Tensor]:
    return [p.detach().clone() for p in held.parameters(layers)]
