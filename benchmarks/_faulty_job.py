"""The Llama job with faults that only a worker's own code meets: each befalls one worker, in a step of its own.

memory   a tensor that does not fit the device
kernel   an index out of range, after which a GPU refuses all work of the process
hang     a kernel that does not end; on a CPU, a sleep
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from chameleon_ft.config import TrainConfig
from chameleon_ft.job.job import Job
from chameleon_ft.models.llama import llama_job

STEPS: Final = {4: "memory", 8: "kernel", 12: "hang"}
_FOR_EVER_S: Final = 3600
_CYCLES: Final = 1 << 45  # some hours


def job(config: TrainConfig) -> Job:
    """Return the Llama job of `config`; the first worker to begin a step of `STEPS` has its fault, and no other one."""
    plain = llama_job(config)
    if config.output_dir is None or plain.learning_rate is None:
        raise ValueError("faults need a run directory and a learning rate that is set in each step")
    faults = _Faults(config.output_dir)
    first, *others = plain.layers
    schedule = plain.learning_rate

    def faulty_layer() -> nn.Module:
        layer = first()
        layer.register_forward_pre_hook(lambda _, inputs: faults.at(inputs[0]))
        return layer

    def noted_rate(step: int) -> float:
        faults.step = step + 1
        return schedule(step)

    return dataclasses.replace(plain, layers=(faulty_layer, *others), learning_rate=noted_rate)


class _Faults:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.step = 0

    def at(self, inputs: Tensor) -> None:
        """Fail if this is the first process that begins a step with a fault; a plain loop begins them later."""
        kind = STEPS.get(self.step)
        if kind is None or inputs.is_meta:  # boundary shapes are found by running the layers on the meta device
            return
        with suppress(FileExistsError):
            (self._folder / f"fault-{kind}").touch(exist_ok=False)
            _fail(kind, inputs.device)


def _fail(kind: str, device: torch.device) -> None:
    match kind:
        case "memory":
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        case "kernel":
            torch.zeros(2, device=device)[torch.tensor([7], device=device)].sum().item()
        case "hang" if device.type == "cuda":
            torch.cuda._sleep(_CYCLES)
        case "hang":
            time.sleep(_FOR_EVER_S)
