"""Runs for the parts of `benchmarks.gpu`: their configuration, their start, and the plain loop beside them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from benchmarks._common import ROOT, Bar, child, worker_environment, write_config
from benchmarks._gpu_parts import Subject, config_of
from benchmarks._live_run import Tail
from benchmarks._neighbours import progress
from chameleon_ft.config import (
    Batch,
    Checkpoint,
    LlamaConfig,
    Optimizer,
    Parallel,
    PolicyName,
    Recovery,
    RunConfig,
    Snapshots,
    TrainConfig,
)
from chameleon_ft.storage.files import RunDirectory

WORKERS: Final = 4
DEVIATION: Final = 1e-5
"""Largest relative deviation of a loss from the plain loop, in float32."""
_POLL_S: Final = 0.02


def run_config(
    subject: Subject, *, policy: PolicyName = "reroute", model: LlamaConfig | None = None, **changes: Any
) -> TrainConfig:
    """Return a run of four ranks, by default in float32, so that losses can be compared to their last digits."""
    fields: dict[str, Any] = {
        "workers": WORKERS,
        "parallel": Parallel(dp=2, pp=2),
        "batch": Batch(micro_batches=8, micro_batch_size=2),
        "steps": subject.size.steps,
        "checkpoint": Checkpoint(every=0),
        "snapshots": Snapshots(every=0),
        "recovery": Recovery(policy=policy),
        # Steps at which the loss jumps would make much of the last digits.
        "optimizer": Optimizer(lr=3e-4, min_lr=3e-5),
        **changes,
    }
    return config_of(subject, model or subject.size.run_model, **fields).model_copy(update={"threads": 1})


def measured_profile(subject: Subject, config: TrainConfig, folder: Path) -> Path:
    """Measure the profile of a run as a user does, in a process of its own, which leaves the device afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "profile.json"
    file = write_config(config, folder / "profile.toml")
    progress("profile of the model that four ranks train")
    repeats = str(subject.size.repeats)
    command("profile", str(file), "--out", str(out), "--repeats", repeats, timeout_s=subject.timeout_s)
    return out


@contextmanager
def live(config: RunConfig, path: Path, *, from_step: int, timeout_s: float) -> Iterator[RunDirectory]:
    """Start `chameleon train` in `path`, and enter the block once so many steps are committed.

    The end of the block waits for that of the run. Exits if the run fails.
    """
    file, log, run = write_config(config, path.with_suffix(".toml")), path.with_suffix(".log"), RunDirectory(path)
    started = [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(path)]
    with child(started, log=log) as process:
        _await_steps(run, from_step, process, timeout_s=timeout_s)
        yield run
        code = process.wait(timeout_s)
    if code:
        raise SystemExit(f"{path}: ended with exit code {code}; see {log}")


def _await_steps(run: RunDirectory, number: int, process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    tail, committed, deadline = Tail(run.metrics_file), 0, time.monotonic() + timeout_s
    while committed < number:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{run.path}: has not trained {number} steps; see {run.path.with_suffix('.log')}")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        committed += sum(1 for _ in tail.new())


def verify(run: RunDirectory, subject: Subject) -> dict[str, Any]:
    """Return what `chameleon verify` finds for a run."""
    progress(f"the plain loop of {run.path.name}")
    # Its exit code, like its output, says whether the losses agree.
    text = command("verify", str(run.path), "--json", timeout_s=subject.timeout_s, codes=(0, 1))
    found: dict[str, Any] = json.loads(text)
    return found


def deviation_bar(verified: dict[str, Any], limit: float = DEVIATION) -> Bar:
    """Return the bar for the losses of a run, from the result of `verify`."""
    value = verified["max_relative_loss_deviation"]
    return Bar(name="largest relative deviation of a loss from the plain loop", value=value, limit=limit)


def command(*arguments: str, timeout_s: float, codes: Collection[int] = (0,)) -> str:
    """Run a command of chameleon and return what it prints; exits if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "chameleon_ft", *arguments],
        cwd=ROOT,
        env=worker_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode not in codes:
        raise SystemExit(f"chameleon {' '.join(arguments)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
