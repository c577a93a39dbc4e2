"""Kernels are compiled before the first decision."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: others have run kernels before.
_MISSING = """
import pkgutil, importlib
import chameleon_ft
from chameleon_ft.recovery import warm_up
warm_up()
for found in pkgutil.walk_packages(chameleon_ft.__path__, "chameleon_ft."):
    if "kernel" in found.name and not found.ispkg:
        for name, each in vars(importlib.import_module(found.name)).items():
            kept = type(getattr(each, "_cache", None)).__module__ == "chameleon_ft.schedule.jit"
            if kept and each.py_func.__module__ == found.name:
                print(name, len(each.signatures))
"""


def test_every_kernel_is_there_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", _MISSING], capture_output=True, text=True, check=True)
    compiled = dict(line.split() for line in done.stdout.splitlines())
    assert {"fill_bounds", "run_scheduler", "replay_neighbours", "fill_table", "fill_allowed"} <= compiled.keys()
    assert [name for name, signatures in compiled.items() if signatures != "1"] == []
