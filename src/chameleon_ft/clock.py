"""The clock of records: Unix seconds that never jump while a process runs.

A clock that is set would otherwise change the order of the records of a run, and the time between two of
them. All processes that descend from one, such as the coordinator and the workers of a host, count from its start.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_VARIABLE: Final = "CHAMELEON_CLOCK"  # BOOT ID=Unix seconds at the boot of this host


def _booted_at_s() -> float:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    name, _, seconds = os.environ.get(_VARIABLE, "").partition("=")
    if not boot or name != boot:  # as of another host, whose environment a batch system has passed on
        seconds = repr(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
        os.environ[_VARIABLE] = f"{boot}={seconds}"
    return float(seconds)


_BOOTED_AT_S: Final = _booted_at_s()


def unix_s() -> float:
    """Return Unix seconds, by the clock of the machine when the first of these processes was started."""
    return _BOOTED_AT_S + time.clock_gettime(time.CLOCK_BOOTTIME)
