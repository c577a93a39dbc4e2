"""The memory of this host that its processes can still use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
            except (OSError, ValueError):  # without a limit, or none that this process may read
                continue
            yield max(0, limit - used + cached)
