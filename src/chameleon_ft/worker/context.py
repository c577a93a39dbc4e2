"""The values that the parts of a rank share for its life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chameleon_ft.job.job import Job
from chameleon_ft.schedule import Operation
from chameleon_ft.trees import Boundary
from chameleon_ft.worker.control_client import Activity
from chameleon_ft.worker.fault_injection import FaultInjector

Pace = Callable[[Operation, float], None]
"""Returns when an operation, begun at so many seconds of `time.perf_counter`, would end on an emulated device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The values that the parts of a rank share for its life.

    Attributes:
        boundaries: The expected output of each layer of the job.
        activity: The activity of the training thread.
        pace: It makes operations as slow as on an emulated device; None on a real one.
        stand_in_scale: How many bytes of the model a byte stands for, if the layers are the stand-ins of an emulated
            device (`lab.stand_in`); otherwise None.
    """

    worker: int
    job: Job
    boundaries: Sequence[Boundary]
    device: torch.device
    activity: Activity
    faults: FaultInjector
    pace: Pace | None = None
    stand_in_scale: int | None = None
