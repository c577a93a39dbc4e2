"""The settings of a run that its state depends on; they do not change while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from chameleon_ft.config import (
    BackendName,
    Checkpoint,
    DeviceName,
    Health,
    Preflight,
    Recovery,
    RunConfig,
    Snapshots,
    Timeouts,
)
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that the workers of a run need."""

    device: DeviceName
    backend: BackendName
    share_devices: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The constants of a run."""

    workers: int
    steps: int
    num_layers: int
    checkpoint: Checkpoint
    recovery: Recovery
    timeouts: Timeouts
    health: Health = field(default_factory=Health)
    snapshots: Snapshots = field(default_factory=Snapshots)
    preflight: Preflight = field(default_factory=Preflight)
    # Whether the job has samples to evaluate.
    has_evaluation: bool = False
    # The devices that hosts need; None if they are emulated.
    devices: Devices | None = None
    # The versions of packages on the host of the coordinator.
    versions: Mapping[str, str] = FrozenMap({})
    # None if hosts are real.
    workers_per_host: int | None
    # The folder of the logs and the place of the checkpoints, for messages.
    logs: str
    checkpoints: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", FrozenMap(self.versions))

    @classmethod
    def of(
        cls,
        config: RunConfig,
        run: RunDirectory,
        *,
        num_layers: int,
        versions: Mapping[str, str] = FrozenMap({}),
        has_evaluation: bool = False,
    ) -> Self:
        """Return the settings of a run; `versions` are those of packages on this host."""
        return cls(
            workers=config.workers,
            steps=config.steps,
            num_layers=num_layers,
            has_evaluation=has_evaluation,
            checkpoint=config.checkpoint,
            recovery=config.recovery,
            timeouts=config.timeouts,
            health=config.health,
            snapshots=config.snapshots,
            preflight=config.preflight,
            devices=None if config.is_emulated else Devices(config.device, config.backend, config.share_devices),
            versions=versions,
            workers_per_host=config.emulation.workers_per_host if config.is_emulated else None,
            logs=str(run.logs),
            checkpoints=config.store.checkpoints if config.store.url else str(run.checkpoints),
        )

    def judges_link(self, *, is_between_hosts: bool) -> bool:
        """Return whether a link of this kind may be found slow."""
        return is_between_hosts or self.health.slow_links == "all" or self.workers_per_host is not None
