"""The device at hand."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError

__all__ = ["claim_device", "device_memory_bytes", "device_name"]


def claim_device(config: RunConfig, local_index: int = 0) -> torch.device:
    """Have this process compute as worker number `local_index` of its host does; for an emulated device, on the CPU.

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
    """What computes, as it calls itself."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def device_memory_bytes(device: torch.device) -> int | None:
    """Memory of an accelerator; None on a CPU, whose memory is shared by as many workers as will be on the host."""
    if device.type == "cpu":
        return None
    _, total = torch.accelerator.get_memory_info(device)
    return int(total)
