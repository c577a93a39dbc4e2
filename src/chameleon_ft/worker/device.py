"""The device of a rank, found through `torch.accelerator` by its entry in `DEVICES`, and its communicators."""

from __future__ import annotations

import contextlib
import importlib
import platform
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, distributed

from chameleon_ft.config import BACKENDS, DEVICES, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Compile
from chameleon_ft.models.compilation import missing_compiler
from chameleon_ft.registry import imported
from chameleon_ft.worker.communicators.base import Communicators


def missing_device(config: RunConfig) -> str:
    """Return why no worker of `config` can run on this host, as the rest of a sentence; empty if one can.

    Finding devices may initialize their driver, after which a forked process cannot use them: call this only in a
    process that forks none that computes.
    """
    kind = DEVICES[config.device]
    if kind.package:
        try:
            importlib.import_module(kind.package)
        except (ImportError, OSError) as error:
            return f"the package {kind.package} is not installed, or not for torch {torch.__version__} ({error})"
    if not _has_backend(config.backend):
        return f"torch {torch.__version__} is built without the backend {config.backend}"
    if not kind.is_accelerator:
        return ""
    built_for = torch.accelerator.current_accelerator()
    if built_for is None or built_for.type != config.device:
        instead = "" if built_for is None else f", and for {built_for.type} instead"
        return f"torch {torch.__version__} is built without it{instead}"
    if not torch.accelerator.device_count():
        return "this host has none that torch can use; look at its driver, and at the devices that the job was given"
    return ""


def _has_backend(name: str) -> bool:
    if (library := BACKENDS[name].library) is None:
        return distributed.is_backend_available(name)
    try:
        imported(library.process_group)
    except ConfigError:
        return False
    return True


def require_devices(config: RunConfig, workers: int) -> None:
    """Raise ConfigError unless this host has the device, and the compiler, of `config` for so many workers."""
    names = f'device = "{config.device}"' + ("" if config.backend == "gloo" else f', backend = "{config.backend}"')
    if why := missing_device(config):
        raise ConfigError(f'{names}: {why}; or take device = "cpu" with the backend gloo')
    own, is_accelerator = Compile(config.compile, config.compile_backend), DEVICES[config.device].is_accelerator
    if why := missing_compiler(own, on_accelerator=is_accelerator):
        raise ConfigError(f'compile = "{config.compile}": {why}; or leave compile out')
    if not is_accelerator:
        return
    if config.share_devices:
        if why := _cannot_share(config.backend):
            raise ConfigError(f'{names}, share_devices = true: {why}; or take backend = "gloo"')
        return
    if (count := torch.accelerator.device_count()) < workers:
        raise ConfigError(
            f"{names}: this host has {count}, and {workers} workers on it need one each; start fewer workers here, or "
            "let them share devices by share_devices = true"
        )


def _cannot_share(backend: str) -> str:
    """Return why several workers cannot share a device over a backend; empty if they can."""
    library = BACKENDS[backend].library
    if library is None or not library.shared_from:
        return ""
    found: tuple[int, ...] = imported(library.version)()
    if found >= library.shared_from:
        return ""
    needed, there = (".".join(map(str, each)) for each in (library.shared_from, found))
    return f"needs {backend} {needed} or newer, and torch has loaded {there}; install a newer one"


def claim_device(config: RunConfig, local_index: int = 0) -> torch.device:
    """Take the device of worker number `local_index` of this host, the CPU for an emulated one, and its threads.

    Raises:
        ConfigError: the configuration names a device that this host does not have, or has too few of.
    """
    torch.set_num_threads(config.threads)
    require_devices(config, local_index + 1)
    if not DEVICES[config.device].is_accelerator:
        return torch.device("cpu")
    device = torch.device(config.device, local_index % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def device_name(device: torch.device) -> str:
    """Return the model name of the accelerator or of the CPU."""
    if not is_host_memory(device):
        return str(torch.get_device_module(device).get_device_name(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def is_host_memory(device: torch.device) -> bool:
    """Return whether tensors on `device` are in host memory, and its operations end before they return."""
    return device.type == "cpu"


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream whose work does not wait for that of the present one; a CPU has none."""
    return None if is_host_memory(device) else torch.Stream(device)


def wait_for_stream(device: torch.device) -> None:
    """Block until the work that this thread has queued on `device` is done."""
    if not is_host_memory(device):
        torch.accelerator.current_stream(device).synchronize()


def host_memory_for(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is in host memory; otherwise memory of its shape there, for `copy_across`."""
    return tensor if tensor.is_cpu else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def copied_to_host(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is in host memory; otherwise a copy of it there."""
    host = host_memory_for(tensor)
    if host is not tensor:
        copy_across(host, tensor)
    return host


def copied_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of host memory on `device`, behind what this thread has queued there, without a wait for it."""
    return tensor if is_host_memory(device) else tensor.pin_memory().to(device, non_blocking=True)


def copy_across(target: Tensor, source: Tensor) -> None:
    """Copy between a device and `host_memory_for` it, and block until that is done.

    It waits for what this thread has queued on the device, and nothing that is queued later waits for it.
    """
    device = source.device if target.is_cpu else target.device
    queued = torch.accelerator.current_stream(device).record_event()
    with exclusive_stream(device) as stream:
        stream.wait_event(queued)
        target.copy_(source, non_blocking=True)
        stream.record_event().synchronize()


_FREE_STREAMS: Final[deque[torch.Stream]] = deque()


@contextmanager
def exclusive_stream(device: torch.device) -> Iterator[torch.Stream]:
    """Enqueue on a stream that nothing else uses inside the block; leave it empty, unless the block raises."""
    try:
        stream = _FREE_STREAMS.pop()
    except IndexError:
        stream = torch.Stream(device)
    with stream:
        yield stream
    _FREE_STREAMS.append(stream)


def worker_memory_bytes(config: RunConfig, device: torch.device) -> int | None:
    """Return the memory that a worker's tensors can have on its accelerator, or its share of that.

    Each process takes some memory for the driver and its kernels; so what this process has beside its tensors is
    subtracted. None on a CPU, whose memory all workers of the host share.
    """
    if is_host_memory(device):
        return None
    count = torch.accelerator.device_count()
    sharing = -(-config.workers // count) if config.share_devices else 1
    free, total = torch.accelerator.get_memory_info(device)
    beside_tensors = total - free - torch.accelerator.memory_reserved(device)
    return int(total // sharing - beside_tensors)


def communicators_for(config: RunConfig, *, address: str, device: torch.device) -> Communicators:
    """Return unopened communicators of the backend that `config` names, for a rank that others reach at `address`."""
    make: Callable[..., Communicators] = imported(BACKENDS[config.backend].communicators)
    return make(config, address=address, device=device)
