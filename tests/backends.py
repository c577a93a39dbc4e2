"""Whole test sessions and benchmarks on the pretended accelerator."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

_PLACE = Path(__file__).parent / "pretended"

ENVIRON = {
    "PYTHONPATH": os.pathsep.join([str(_PLACE), os.environ.get("PYTHONPATH", "")]),
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}
"""For a process that uses it."""


def use_backend(backend: str) -> None:
    """Let every `small_config` of this process, and of those that it starts, use a backend; see `--backend`."""
    if backend == "gloo":
        return
    os.environ.update(ENVIRON, CHAMELEON_TEST_BACKEND=backend)
    sys.path.insert(0, str(_PLACE))
    # The plain loop runs on the device in this process.
    importlib.import_module("torch_npu")
