"""Shared parts of the benchmarks: flags, child processes, medians with spread, reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._neighbours import Neighbours
from chameleon_ft.config import RunConfig, TrainConfig, config_to_toml, load_config
from chameleon_ft.host.fork_server import end_with

ROOT = Path(__file__).resolve().parent.parent
STAMPED_JOB = f"{Path(__file__).with_name('_stamped_job.py')}:job"


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a spread needs at least one measurement")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        """Return count, median, extremes, quartiles and the values themselves."""
        low, _, high = statistics.quantiles(self.values, n=4) if len(self.values) > 1 else [self.median] * 3
        return {
            "count": len(self.values),
            "median": self.median,
            "least": min(self.values),
            "largest": max(self.values),
            "quartiles": [low, high],
            "values": list(self.values),
        }

    def shown(self, digits: int = 3) -> str:
        """Return the median and the extremes for a table."""
        return f"{self.median:.{digits}f} ({min(self.values):.{digits}f} to {max(self.values):.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A limit that a benchmark has to reach."""

    name: str
    value: float
    limit: float
    at_least: bool = False
    """Whether the value has to be at least the limit, and not at most."""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}

    def __str__(self) -> str:
        asked = "at least" if self.at_least else "at most"
        return (
            f"{'reached' if self.reached else 'MISSED':8} {self.name}: {self.value:.4g}, asked {asked} {self.limit:g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a benchmark: a table as text, everything as JSON."""

    benchmark: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: tuple[Bar, ...]
    results: Mapping[str, Any]
    neighbours: Neighbours | None = None
    """Load by other processes during the measurements; None if no times were taken."""

    def emit(self, folder: Path, *, as_json: bool) -> int:
        """Write ``report.json`` to the raw data, print it, and return the exit code: 0 if every bar is reached."""
        data = {
            "benchmark": self.benchmark,
            "measured_on": measured_on(),
            **({} if self.neighbours is None else self.neighbours.to_json()),
            "raw_data": str(folder),
            "bars": [bar.to_json() for bar in self.bars],
            **self.results,
        }
        text = json.dumps(data, indent=2)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        print(text if as_json else self._as_text(folder))
        return 0 if all(bar.reached for bar in self.bars) else 1

    def _as_text(self, folder: Path) -> str:
        table = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        where = ", ".join(f"{key} {value}" for key, value in measured_on().items())
        return "\n".join(
            [
                *lines,
                "",
                *map(str, self.bars),
                "",
                f"measured on: {where}",
                *([] if self.neighbours is None else [str(self.neighbours)]),
                f"raw data: {folder}",
            ]
        )


def measured_on() -> dict[str, Any]:
    """Return a description of this machine and its software."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "device": "cpu",
        "backend": "gloo",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def report_arguments(description: str | None, *, name: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs") / f"benchmark-{name}-{time.strftime('%Y%m%d-%H%M%S')}",
        help="new directory for the raw data",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def arguments(description: str | None, *, name: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks that train."""
    parser = report_arguments(description, name=name)
    parser.add_argument(
        "--config", type=Path, default=ROOT / "examples" / "quickstart.toml", help="model, layout and batch (TOML)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    return parser


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a benchmark that trains over another library; see `use_backend`."""
    parser.add_argument(
        "--backend",
        choices=["gloo", "pretended-nccl"],
        default="gloo",
        help="library that sends tensors: gloo, or the pretended one of tests/pretended, on its pretended accelerator",
    )


def add_most_others(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a benchmark that takes times; see `Neighbours`."""
    parser.add_argument(
        "--max-others",
        type=float,
        default=0.05,
        help="share of the machine that other processes may take during a run; above it the run is made again",
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for the docs, with a line for each row."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def new_folder(path: Path) -> Path:
    """Make the directory of the raw data and return its absolute path."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise SystemExit(f"{path}: exists already; name a new directory") from None
    return path.resolve()


def base_config(path: Path, *, stamped: bool = True, **changes: Any) -> TrainConfig:
    """Read a configuration of the Llama, without its failures, checkpoints, snapshots and shared optimizer state.

    `changes` replace whole fields.
    """
    config: RunConfig = load_config(path)
    if not isinstance(config, TrainConfig):
        raise SystemExit(f"--config {path}: describes another job than the Llama that all systems here train")
    checkpoint, snapshots = (each.model_copy(update={"every": 0}) for each in (config.checkpoint, config.snapshots))
    parallel = config.parallel.model_copy(update={"optimizer_redundancy": "all"})
    fresh = {"failures": (), "checkpoint": checkpoint, "snapshots": snapshots, "parallel": parallel}
    return config.model_copy(update={**fresh, **changes, **({"job": STAMPED_JOB} if stamped else {})})


def write_config(config: RunConfig, path: Path) -> Path:
    """Write `config` for a child process to read."""
    path.write_text(config_to_toml(config), encoding="utf-8")
    return path


def worker_environment() -> dict[str, str]:
    """Return the environment of a child that imports this project from its source, one compute thread each."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@contextmanager
def child(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` inside the block with its output in `log`, and kill its process group at the end of the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**worker_environment(), **(environment or {})},
            start_new_session=True,
            preexec_fn=partial(end_with, os.getpid()),
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_child(
    command: Sequence[str], *, log: Path, timeout_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run `command` to its end. Exits with the tail of its output if it fails or takes too long."""
    with child(command, log=log, environment=environment) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _fail(log, f"did not end within {timeout_s:g} s (--timeout)")
    if code != 0:
        _fail(log, f"ended with exit code {code}")


def _fail(log: Path, what: str) -> None:
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    raise SystemExit("\n".join([*tail, f"the run that wrote {log} {what}"]))
