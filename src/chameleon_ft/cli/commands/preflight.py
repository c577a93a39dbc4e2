"""`chameleon preflight`: examine this machine as a run does before it admits a host."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.config import DEVICES, DeviceName
from chameleon_ft.errors import ConfigError
from chameleon_ft.quantities import data_size


@dataclass(frozen=True, kw_only=True)
class PreflightArguments:
    """Examine this machine, as `chameleon agent` does before a run admits it, and print what is found.

    What a run compares with other hosts, such as versions and speeds, is only printed here. The exit code is 1 if
    workers cannot run.
    """

    device: DeviceName = "cpu"
    """Device of a worker, as in a configuration."""
    workers: PositiveInt = 1
    """Worker processes that are to run here."""
    share_devices: bool = False
    """Let workers share accelerators."""
    json: bool = False
    """Print the report as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(PreflightArguments, arguments, command="preflight")
    if given.device == "emulated":
        raise ConfigError("--device emulated: such devices are on no machine; name the one to examine")
    from chameleon_ft.protocol.messages import Examine
    from chameleon_ft.worker.preflight import examine

    report = examine(
        Examine(
            device=given.device,
            backend=DEVICES[given.device].backends[0],
            workers=given.workers,
            share_devices=given.share_devices,
            measures=True,
        )
    )
    if given.json:
        print(report.model_dump_json(indent=2))
        return int(bool(report.problem))
    for name, text in (
        ("devices", ", ".join(report.devices)),
        ("free memory", f"{report.free_memory:.0%}" if report.devices and given.device != "cpu" else ""),
        ("matrix products", f"{report.matmul_flops / 1e12:.3g} TFLOP/s" if report.matmul_flops else ""),
        ("copies in memory", f"{data_size(report.copy_bytes_per_s)}/s" if report.copy_bytes_per_s else ""),
        ("active InfiniBand ports", str(report.links)),
        *report.versions,
    ):
        if text:
            print(f"{name:24} {text}")
    if report.problem:
        print(f"no worker can run here: {report.problem}", file=sys.stderr)
    return int(bool(report.problem))
