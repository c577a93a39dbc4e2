"""Measure what a single GPU can show within a quarter of an hour, and write one report.

  profiles    measured layers of published models in bf16, beside those derived from the device's data sheet
  memory      predicted peaks beside those of the device's allocator
  checksums   of equal bytes on the device and on the CPU, and the time for a large state
  optimizer   the fused update beside torch's plain one
  alone       a step of one rank beside predictions
  steps       a step of four ranks that share the device, over gloo, beside predictions
  salvage     a rank is killed in a backward; losses beside those of the plain loop
  migration   a rank is drained and its layers move while all train; losses beside those of the plain loop
  snapshots   the only holder of some layers is killed; losses beside those of the plain loop
  bf16        as salvage, in bf16 with a shared optimizer
  corruption  bits of a rank's state flip, and are found; losses beside those of the plain loop
  slow        a rank becomes slow, and is noticed, and no other one
  joins       a killed rank is replaced by a new process; losses beside those of the plain loop
  takeover    the coordinator is killed and replaced; losses beside those of the plain loop
  errors      ranks run out of memory, fail in a kernel and hang in one; losses beside those of the plain loop
  checkpoint  a run is continued from a checkpoint, on the device and on the CPU
  nccl        losses, a hang, a migration and snapshots over the device's library, which four ranks share; its steps

A part that fails is in the report and does not end the others. report.md and report.json are written after each part.
`--device cpu --small` rehearses all parts but the last in a few minutes, and `--backend pretended-nccl --small --parts
nccl` that one, over the library of tests/pretended; what they measure means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import _gpu_faults, _gpu_nccl, _gpu_parts, _gpu_runs
from benchmarks._common import ROOT, add_backend, markdown_table, new_folder, report_arguments
from benchmarks._gpu_parts import FULL, SMALL, Result, Subject
from benchmarks._neighbours import progress
from chameleon_ft.config import DEVICES, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.worker.device import claim_device, device_name
from tests.backends import use_backend

_PARTS: Final[Mapping[str, Callable[[Subject], Result]]] = {
    "profiles": _gpu_parts.profiles,
    "memory": _gpu_parts.memory,
    "checksums": _gpu_parts.checksums,
    "optimizer": _gpu_parts.optimizer,
    "alone": _gpu_runs.alone,
    "steps": _gpu_runs.steps,
    "salvage": _gpu_runs.salvage,
    "migration": _gpu_runs.migration,
    "snapshots": _gpu_runs.snapshots,
    "bf16": _gpu_runs.in_bf16,
    "corruption": _gpu_faults.corruption,
    "slow": _gpu_faults.slowness,
    "joins": _gpu_faults.joins,
    "takeover": _gpu_faults.takeover,
    "errors": _gpu_faults.errors,
    "checkpoint": _gpu_faults.resumption,
    "nccl": _gpu_nccl.nccl,
}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part that has been run: its result, or the error that ended it."""

    name: str
    seconds: float
    result: Result | None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.result is not None and all(bar.reached for bar in self.result.bars)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"part": self.name, "seconds": self.seconds, "passed": self.passed}
        if self.result is None:
            return {**found, "error": self.error}
        bars = [bar.to_json() for bar in self.result.bars]
        return {**found, "bars": bars, "remarks": list(self.result.remarks), **self.result.data}

    def as_markdown(self) -> str:
        head = f"## {self.name}\n\n"
        if self.result is None:
            return f"{head}**Failed** after {self.seconds:.0f} s:\n\n```text\n{self.error.strip()}\n```\n"
        table = markdown_table(self.result.columns, self.result.rows)
        notes = [*map(str, self.result.bars), *self.result.remarks, f"took {self.seconds:.0f} s"]
        return f"{head}{table}\n" + "".join(f"- {note}\n" for note in notes)


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    subject = Subject(
        device=given.device,
        size=SMALL if given.small else FULL,
        folder=folder,
        command=command,
        timeout_s=given.timeout,
        library=given.backend if given.backend != "gloo" else next(iter(DEVICES[given.device].backends[1:]), "gloo"),
    )
    facts = _provenance(subject, given.commit)
    parts: list[_Part] = []
    for name in given.parts:
        parts.append(_run(name, subject))
        _write(folder, facts, parts, is_rehearsal=given.small or given.device == "cpu" or given.backend != "gloo")
    print((folder / ("report.json" if given.json else "report.md")).read_text(encoding="utf-8"), end="")
    return 0 if all(part.passed for part in parts) else 1


def _run(name: str, subject: Subject) -> _Part:
    progress(f"part {name}")
    start = time.monotonic()
    result, error = None, ""
    try:
        result = _PARTS[name](subject)
    except (Exception, SystemExit):  # noqa: BLE001 - the others are to show what they can
        error = traceback.format_exc()
        progress(f"part {name} failed: {error.strip().splitlines()[-1]}")
    return _Part(name, time.monotonic() - start, result, error)


def _write(folder: Path, facts: Mapping[str, str], parts: list[_Part], *, is_rehearsal: bool) -> None:
    warning = "**A rehearsal: these figures mean nothing.**\n\n" if is_rehearsal else ""
    rows = markdown_table(("", ""), facts.items())
    text = "\n".join([f"# What a GPU does\n\n{warning}{rows}", *(part.as_markdown() for part in parts)])
    (folder / "report.md").write_text(text, encoding="utf-8")
    data = {
        "benchmark": "gpu",
        "is_rehearsal": is_rehearsal,
        "provenance": dict(facts),
        "parts": [part.to_json() for part in parts],
    }
    (folder / "report.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _provenance(subject: Subject, commit: str) -> dict[str, str]:
    """Return what was measured, where and how."""
    place = claim_device(RunConfig(device=subject.device))
    return {
        "device": device_name(place),
        "driver": _driver() if subject.device == "cuda" else "-",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or '-'}",
        "python": platform.python_version(),
        "commit": commit or _output("git", "describe", "--always", "--dirty", "--abbrev=12") or "unknown",
        "command": subject.command,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _driver() -> str:
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else "unknown"


def _output(*command: str) -> str:
    """Return what a command prints; empty if there is none of that name, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return ""


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="gpu")
    devices = [name for name, kind in DEVICES.items() if kind.is_accelerator or name == "cpu"]
    parser.add_argument("--device", choices=devices, default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to rehearse")
    parser.add_argument("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS), metavar="PART")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that one run may take")
    add_backend(parser)
    parser.add_argument("--commit", default="", help="what is measured, if this is no git checkout")
    given = parser.parse_args()
    use_backend(given.backend)
    if given.backend != "gloo":
        given.device = "npu"
    try:
        claim_device(RunConfig(device=given.device))
    except ConfigError as error:
        parser.error(f"--device {given.device}: {error}")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
