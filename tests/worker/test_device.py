"""The registry of devices and backends, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed

from chameleon_ft.config import DEVICES, BackendName, DeviceName, Parallel, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.models import build
from chameleon_ft.worker.device import (
    claim_device,
    device_name,
    missing_device,
    require_devices,
    side_stream,
    wait_for_stream,
    worker_memory_bytes,
)

CPU = torch.device("cpu")


def machine(monkeypatch: pytest.MonkeyPatch, *, built_for: str | None, count: int) -> list[int]:
    """Have torch find `count` accelerators of a type that it is built for; return those that are made current."""
    current: list[int] = []
    found = None if built_for is None else torch.device(built_for)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(distributed, "is_backend_available", lambda name: True)
    return current


def config(device: DeviceName, backend: BackendName = "gloo", **more: Any) -> RunConfig:
    return RunConfig(device=device, backend=backend, **more)


@pytest.mark.parametrize(
    ("built_for", "count"),
    [
        (None, 0),
        ("xpu", 4),
        ("cuda", 0),
    ],
)
def test_the_reason_why_a_device_is_missing_is_named(
    built_for: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, built_for=built_for, count=count)
    with pytest.raises(ConfigError):
        require_devices(config("cuda"), 1)


def test_the_package_of_a_device_outside_torch_is_named() -> None:
    if importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("it is installed")
    assert "the package torch_npu is not installed" in missing_device(config("npu"))


def test_a_backend_that_torch_is_built_without_is_named() -> None:
    if distributed.is_nccl_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError):
        require_devices(config("cuda", "nccl"), 1)


def test_each_worker_of_a_host_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current = machine(monkeypatch, built_for="cuda", count=2)
    assert claim_device(config("cuda"), 1) == torch.device("cuda", 1)
    assert current == [1]
    with pytest.raises(ConfigError):
        claim_device(config("cuda"), 2)


def test_workers_may_share_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    current = machine(monkeypatch, built_for="cuda", count=2)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 290)
    sharing = config("cuda", share_devices=True, workers=6, parallel=Parallel(dp=2, pp=3))
    require_devices(sharing, 6)
    assert claim_device(sharing, 5) == torch.device("cuda", 1)
    assert current == [1]
    # Each process takes 10 bytes beside its tensors.
    assert worker_memory_bytes(sharing, torch.device("cuda", 1)) == 323
    assert worker_memory_bytes(config("cuda"), torch.device("cuda", 1)) == 990


def test_workers_share_a_device_over_nccl_from_the_version_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, built_for="cuda", count=1)
    monkeypatch.setattr("chameleon_ft.worker.device._has_backend", lambda name: True)
    sharing = config("cuda", "nccl", share_devices=True, workers=2, parallel=Parallel(dp=1, pp=2))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    with pytest.raises(ConfigError):
        require_devices(sharing, 2)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    require_devices(sharing, 2)


def test_a_cpu_says_what_it_is_and_leaves_its_memory_open() -> None:
    assert device_name(claim_device(RunConfig()))
    assert worker_memory_bytes(RunConfig(), CPU) is None
    assert side_stream(CPU) is None
    wait_for_stream(CPU)


def test_gloo_sends_the_tensors_of_every_device() -> None:
    assert {kind.backends[0] for kind in DEVICES.values()} == {"gloo"}


def test_the_generator_of_an_accelerator_is_seeded_with_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of a device stands for torch's own, so this shows what is called, and not its effect."""
    seeds: list[tuple[torch.device, int]] = []

    class Module:
        at: torch.device

        def device(self, device: torch.device) -> Module:
            self.at = device
            return self

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def manual_seed(self, seed: int) -> None:
            seeds.append((self.at, seed))

    module = Module()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    seed_forward = partial(build.seed_forward, 5, step=1, micro_batch=2, layer=3)
    with torch.random.fork_rng(devices=[]):
        seed_forward(device=torch.device("xpu", 1))
        assert seeds == [(torch.device("xpu", 1), torch.initial_seed())]
        seed_forward(device=CPU)
        seed_forward()
    assert len(seeds) == 1
