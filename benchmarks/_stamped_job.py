"""The Llama job, with a stamp at each forward of layer 0 and at each update.

Every compared system trains this job, so one clock, at the same two places of the user's code, times all of them. A
stamp is one write of a line, some microseconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from chameleon_ft.config import TrainConfig
from chameleon_ft.job.job import Job
from chameleon_ft.models.llama import llama_job

_FOLDER = "stamps"


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """One event of a process.

    Attributes:
        time: Unix seconds.
        process: its id.
        event: the first layer begins a micro-batch, or the optimizer is about to update.
        step: of an update; a layer does not know its step.
    """

    time: float
    process: int
    event: Literal["forward", "update"]
    step: int | None


def job(config: TrainConfig) -> Job:
    """Return the Llama job of `config` with stamps, which go to a folder of ``config.output_dir``."""
    plain = llama_job(config)
    if config.output_dir is None or plain.learning_rate is None:
        raise ValueError("stamps need a run directory and a learning rate that is set in each step")
    stamp = _Stamper(config.output_dir / _FOLDER)
    first, *others = plain.layers
    schedule = plain.learning_rate

    def stamped_layer() -> nn.Module:
        layer = first()
        layer.register_forward_pre_hook(lambda _, inputs: _stamp_forward(stamp, inputs))
        return layer

    def stamped_rate(step: int) -> float:
        stamp("update", step)
        return schedule(step)

    return dataclasses.replace(plain, layers=(stamped_layer, *others), learning_rate=stamped_rate)


def read_stamps(run: Path) -> list[Stamp]:
    """Return the stamps of all processes of a run, ordered by time."""
    found = [
        Stamp(**json.loads(line))
        for file in (run / _FOLDER).glob("*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(found, key=lambda stamp: stamp.time)


class _Stamper:
    """Appends stamps to a file of the calling process; forked processes get their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = -1
        self._descriptor = -1

    def __call__(self, event: str, step: int | None = None) -> None:
        now = time.time()
        process = os.getpid()
        if process != self._process:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{process}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._process = process
        line = {"time": now, "process": process, "event": event, "step": step}
        os.write(self._descriptor, f"{json.dumps(line)}\n".encode())


def _stamp_forward(stamp: Callable[[str], None], inputs: tuple[Tensor, ...]) -> None:
    if not inputs[0].is_meta:  # boundary shapes are found by running the layers on the meta device
        stamp("forward")
