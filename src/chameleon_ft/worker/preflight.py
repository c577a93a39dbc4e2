"""The examination of a host before workers are started on it: devices, memory, versions, links and speeds."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch

import chameleon_ft
from chameleon_ft.clock import unix_s
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError
from chameleon_ft.protocol.messages import Examine
from chameleon_ft.protocol.parts import HostReport
from chameleon_ft.worker.device import device_name, require_devices

_MIN_MEASURED_S: Final = 0.15
_MIN_REPETITIONS: Final = 5
# By device: the rows of a square matrix, and the bytes of a copy.
_SIZES: Final = {"cpu": (512, 32 << 20)}
_ACCELERATOR_SIZES: Final = (4096, 256 << 20)
_DRIVER: Final = Path("/sys/module/nvidia/version")
_INFINIBAND: Final = Path("/sys/class/infiniband")


def examination_main(pipe: int, *, order: Examine) -> None:
    """Send through `pipe` what is found on this host; it is a descriptor of a `multiprocessing.Pipe`."""
    report = examine(order)
    with contextlib.suppress(OSError):
        Connection(pipe, readable=False).send(report)


def examine(order: Examine) -> HostReport:
    """Examine this host for as many workers as `order` says."""
    found = HostReport(links=_active_ports(), versions=_versions(), clock_s=unix_s())
    try:
        config = RunConfig(device=order.device, backend=order.backend, share_devices=order.share_devices)
        require_devices(config, order.workers)
        devices = [torch.device("cpu")]
        if order.device != "cpu":
            count = min(order.workers, torch.accelerator.device_count())
            devices = [torch.device(order.device, index) for index in range(count)]
        found = found.model_copy(update={"devices": tuple(map(device_name, devices))})
        if order.device != "cpu":
            found = found.model_copy(update={"free_memory": min(map(_free_share, devices))})
        if order.measures:
            speeds = {
                "matmul_flops": min(map(_matmul_flops, devices)),
                "copy_bytes_per_s": min(map(_copy_bytes_per_s, devices)),
            }
            found = found.model_copy(update=speeds)
    except ChameleonError as error:
        found = found.model_copy(update={"problem": str(error)})
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        found = found.model_copy(update={"problem": f"a device cannot be used: {reason}"})
    return found.model_copy(update={"clock_s": unix_s()})


def _free_share(device: torch.device) -> float:
    free, total = torch.get_device_module(device).mem_get_info(device)
    return float(free / total)


def _matmul_flops(device: torch.device) -> float:
    """Return the floating-point operations of a product of two square matrices in a second, in the best repetition."""
    rows, _ = _SIZES.get(device.type, _ACCELERATOR_SIZES)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.ones(rows, rows, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * rows**3 / _shortest_s(device, lambda: torch.mm(left, right, out=out))


def _copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes that a copy within the device's memory moves in a second, in the best repetition."""
    _, num_bytes = _SIZES.get(device.type, _ACCELERATOR_SIZES)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return num_bytes / _shortest_s(device, lambda: target.copy_(source))


def _shortest_s(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some repetitions; other processes may have held up the rest.

    On a CPU, the processor time counts: when others use the processor too, it says nothing about the host.
    """
    on_host = device.type == "cpu"
    clock = time.thread_time if on_host else time.perf_counter
    synchronize = (lambda: None) if on_host else torch.get_device_module(device).synchronize
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # The first run allocates, and loads kernels.
        run()
        synchronize()
        shortest_s, repetitions, until_s = float("inf"), 0, time.perf_counter() + _MIN_MEASURED_S
        while time.perf_counter() < until_s or repetitions < _MIN_REPETITIONS:
            begun_s = clock()
            run()
            synchronize()
            shortest_s, repetitions = min(shortest_s, clock() - begun_s), repetitions + 1
        return shortest_s
    finally:
        torch.set_num_threads(threads)


def _versions() -> tuple[tuple[str, str], ...]:
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "chameleon": chameleon_ft.__version__,
    }
    with contextlib.suppress(OSError):
        versions["driver"] = _DRIVER.read_text(encoding="ascii").strip()
    return tuple(versions.items())


def _active_ports() -> int:
    """Return how many InfiniBand ports of this host are active."""
    active = 0
    for state in _INFINIBAND.glob("*/ports/*/state"):
        with contextlib.suppress(OSError):
            active += "ACTIVE" in state.read_text(encoding="ascii")
    return active


_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes that are free, or can be freed at once, within the limits of this process's cgroups (version 2).

    Where the kernel does not tell, all memory of the host.
    """
    limits = list(_left_in_cgroups(proc, cgroups))
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        limits.append(1024 * int(line.split()[1]))
    except (OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits)


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what each limited cgroup around this process leaves, the innermost first."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for own in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        for folder in (cgroups / own, *(cgroups / each for each in Path(own).parents)):
            try:
                limit = int((folder / "memory.max").read_text(encoding="ascii"))
                used = int((folder / "memory.current").read_text(encoding="ascii"))
                stat = (folder / "memory.stat").read_text(encoding="ascii")
                (cached,) = (int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file "))
            except (OSError, ValueError):
                continue
            yield max(0, limit - used + cached)
