"""Whole test sessions and benchmarks on the pretended accelerator."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, TypeVar

from chameleon_ft.config import RunConfig

_PLACE = Path(__file__).parent / "pretended"

ENVIRON = {
    "PYTHONPATH": os.pathsep.join([str(_PLACE), os.environ.get("PYTHONPATH", "")]),
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}
"""For a process that uses it."""

_Config = TypeVar("_Config", bound=RunConfig)


def use_backend(backend: str) -> None:
    """Let the real runs of this process, and of those that it starts, use a backend; see `--backend`."""
    if backend == "gloo":
        return
    os.environ.update(ENVIRON, CHAMELEON_TEST_BACKEND=backend)
    sys.path.insert(0, str(_PLACE))
    # The plain loop runs on the device in this process. Torch loads its package, unless torch is there already.
    importlib.import_module("torch")
    importlib.import_module("torch_npu")


def on_backend(config: _Config) -> _Config:
    """Return a configuration with the backend of this session, unless it names a device or a backend."""
    backend = os.environ.get("CHAMELEON_TEST_BACKEND", "gloo")
    if backend == "gloo" or config.model_fields_set & {"device", "backend"}:
        return config
    on: dict[str, Any] = {"device": "npu", "backend": backend, "share_devices": True}
    return type(config).model_validate({**config.model_dump(exclude_unset=True), **on})
