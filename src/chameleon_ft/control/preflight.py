"""Whether a host is fit for a run, by what its agent has found there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from chameleon_ft.config import Preflight
from chameleon_ft.control.wire.parts import HostReport
from chameleon_ft.quantities import duration


def reason_against(
    report: HostReport, peers: Sequence[HostReport], *, settings: Preflight, versions: Mapping[str, str], now: float
) -> str | None:
    """Return why a host is not admitted, and what to do; None if it is.

    Args:
        peers: reports of the hosts that were admitted.
        versions: package -> version, where the coordinator runs.
        now: Unix seconds when the report arrived, by the coordinator's clock.
    """
    if report.problem:
        return report.problem
    if report.free_memory < settings.least_free_memory:
        return (
            f"only {report.free_memory:.0%} of the memory of a device is free; end the other jobs there, or lower "
            "preflight.least_free_memory"
        )
    if settings.same_versions and (difference := _other_version(report, peers, versions)) is not None:
        return f"{difference}; install the same, or set preflight.same_versions = false"
    if (error_s := abs(report.clock_s - now)) > settings.most_clock_error_s:
        side = "ahead of" if report.clock_s > now else "behind"
        return (
            f"its clock is {duration(error_s)} {side} that of the coordinator; have NTP set both, or raise "
            "preflight.most_clock_error_s"
        )
    if peers and report.links < (most := statistics.mode(each.links for each in peers)):
        return f"{report.links} InfiniBand ports are active, and {most} on the other hosts; look at their cables"
    return _slow(report, peers, settings.least_speed)


def _other_version(report: HostReport, peers: Sequence[HostReport], versions: Mapping[str, str]) -> str | None:
    """Return a package that has another version than on the coordinator's host, or else on the first admitted one."""
    expected = {**(dict(peers[0].versions) if peers else {}), **versions}
    for package, version in report.versions:
        if package in expected and not _is_same(package, version, expected[package]):
            return f"{package} is {version} here, and {expected[package]} in the run"
    return None


def _is_same(package: str, version: str, other: str) -> bool:
    """Compare versions: of Python without the patch level, of torch without the build for a device."""
    if package == "python":
        return version.split(".")[:2] == other.split(".")[:2]
    return version.partition("+")[0] == other.partition("+")[0]


def _slow(report: HostReport, peers: Sequence[HostReport], least: float) -> str | None:
    speeds: dict[str, Callable[[HostReport], float]] = {
        "matrix products": lambda each: each.matmul_flops,
        "copies in memory": lambda each: each.copy_bytes_per_s,
    }
    for name, speed_of in speeds.items():
        known = [speed for each in peers if (speed := speed_of(each)) > 0]
        if speed_of(report) > 0 and known and (share := speed_of(report) / statistics.median(known)) < least:
            return (
                f"{name} have {share:.0%} of the usual speed of the other hosts; look for a device that is throttled "
                "or used by others, or lower preflight.least_speed"
            )
    return None
