"""The device of a rank: one of this host, or an emulated one, whose operations last as long as a profile says.

Emulated devices are only for processes of one machine, because they share its clock.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.models.stand_in import stand_in_scale
from chameleon_ft.plan import LayerRange
from chameleon_ft.profiles import costs_of_run, profile_of_run
from chameleon_ft.runtime.communicators import Communicators
from chameleon_ft.runtime.communicators.emulated import EmulatedLinks
from chameleon_ft.runtime.process import wake_on_time
from chameleon_ft.schedule import CostModel, Operation, OperationKind

__all__ = ["EmulatedDevice", "EmulatedPace", "claim_device", "device_memory_bytes", "device_name", "side_stream"]


def claim_device(config: RunConfig, local_index: int = 0) -> torch.device:
    """Take the device of worker number `local_index` of this host, the CPU for an emulated one, and its threads.

    Raises:
        ConfigError: the configuration names a device that this host does not have.
    """
    torch.set_num_threads(config.threads)
    if config.device in ("cpu", "emulated"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != config.device:
        raise ConfigError(f'device = "{config.device}": this host has none that torch can use; take "cpu"')
    device = torch.device(config.device, local_index % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def device_name(device: torch.device) -> str:
    """Return the model name of the accelerator or of the CPU."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream whose work does not wait for that of the present one; a CPU has none."""
    return None if device.type == "cpu" else torch.Stream(device)


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the memory of an accelerator; None on a CPU, whose memory all workers of the host share."""
    return None if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[1])


class EmulatedDevice:
    """The device and the links of one worker, by the profile of the run. Raises ProfileError as `profile_of_run`."""

    def __init__(self, config: RunConfig, worker: int) -> None:
        self._config = config
        self._profile = profile_of_run(config)
        self._scale = stand_in_scale(self._profile)
        self.pace = EmulatedPace(self._costs([worker]), worker)
        wake_on_time()

    @property
    def scale(self) -> int:
        """Emulated bytes per real byte of a message."""
        return self._scale

    def links(self, inner: Communicators) -> Communicators:
        """Return communicators that are as slow as the emulated links."""
        return EmulatedLinks(inner, lambda workers: self._costs(workers).cluster, scale=self._scale)

    def _costs(self, workers: Iterable[int]) -> CostModel:
        return costs_of_run(self._config, self._profile, dict.fromkeys(workers, ""))


class EmulatedPace:
    """Sleeps until an operation would end on the device of `worker`. Like a device, it cannot be interrupted."""

    def __init__(self, costs: CostModel, worker: int) -> None:
        self._costs = costs
        self._worker = worker
        self._seconds: dict[tuple[OperationKind, LayerRange, object], float] = {}

    def __call__(self, operation: Operation, since: float) -> None:
        """Return at the emulated end of `operation`, which began at `since` by `time.perf_counter`."""
        key = (operation.kind, operation.layers, operation.recompute)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._costs.operation_s(self._worker, operation)
        remaining = since + seconds - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
