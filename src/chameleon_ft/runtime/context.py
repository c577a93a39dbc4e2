"""What a rank is given for its life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.observe import RunDirectory
from chameleon_ft.runtime.communicators import Communicators
from chameleon_ft.runtime.executor import Pace

__all__ = ["RankContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What stays the same for the life of a rank."""

    worker: int
    config: RunConfig
    run: RunDirectory
    job: Job
    boundaries: tuple[BoundarySpec, ...]
    device: torch.device
    coordinator_host: str
    """Where the rendezvous store is, too."""
    new_communicators: Callable[[], Communicators]
    pace: Pace | None
    """Of an emulated device."""
