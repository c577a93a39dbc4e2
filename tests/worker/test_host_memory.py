"""The memory of this host that its processes can still use, in made-up /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import psutil

from chameleon_ft.worker.preflight import available_bytes

MEMINFO = "MemTotal:       64000000 kB\nMemFree:         1000 kB\nMemAvailable:   48000000 kB\n"


def host(folder: Path, *, meminfo: str = MEMINFO, cgroup: str = "0::/pods/own\n") -> int:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(meminfo)
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    return available_bytes(proc=folder / "proc", cgroups=folder / "cgroup")


def limit(folder: Path, name: str, maximum: str, *, used: int, cached: int) -> None:
    own = folder / "cgroup" / name
    own.mkdir(parents=True, exist_ok=True)
    (own / "memory.max").write_text(f"{maximum}\n")
    (own / "memory.current").write_text(f"{used}\n")
    (own / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def test_without_limits_it_is_what_the_kernel_counts(tmp_path: Path) -> None:
    limit(tmp_path, "pods/own", "max", used=10, cached=0)
    assert host(tmp_path) == 48_000_000 * 1024


def test_the_narrowest_cgroup_counts_without_what_it_has_cached(tmp_path: Path) -> None:
    limit(tmp_path, "pods/own", "9000", used=3000, cached=1000)
    limit(tmp_path, "pods", "8000", used=5000, cached=2000)
    assert host(tmp_path) == 5000


def test_a_limit_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    limit(tmp_path, ".", "9000", used=9500, cached=100)
    assert host(tmp_path, cgroup="4:memory:/else\n0::/\n") == 0


def test_where_the_kernel_does_not_tell_all_memory_counts(tmp_path: Path) -> None:
    assert available_bytes(proc=tmp_path, cgroups=tmp_path) == psutil.virtual_memory().total


def test_of_this_host() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
