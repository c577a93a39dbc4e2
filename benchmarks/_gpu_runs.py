"""The parts of `benchmarks.gpu` that train: four ranks that share the device, over gloo."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import _chameleon
from benchmarks._common import ROOT, Bar, child, worker_environment, write_config
from benchmarks._gpu_parts import Result, Subject, config_of
from benchmarks._live_run import Tail
from benchmarks._neighbours import progress
from chameleon_ft.config import (
    Batch,
    Checkpoint,
    Failure,
    Optimizer,
    Parallel,
    PolicyName,
    Recovery,
    Snapshots,
    Timelines,
    TrainConfig,
)
from chameleon_ft.control.requests import drain
from chameleon_ft.estimate import StepEstimate, estimate_step
from chameleon_ft.observe import RunDirectory, read_generation_plans
from chameleon_ft.profiles import costs_of_run, read_profile

__all__ = ["alone", "in_bf16", "migration", "salvage", "snapshots", "steps"]

_WORKERS: Final = 4
_DEVIATION: Final = 1e-5
_BF16_DEVIATION: Final = 2e-3
_STEP_ERROR: Final = 0.1
_LOST_IN_STEP: Final = 5
_SNAPSHOT_EVERY: Final = 3
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The median step of a run without failures, the prediction for it by its profile, and its report."""

    measured_s: float
    predicted: StepEstimate
    report: dict[str, Any]


def _timed(subject: Subject, name: str, config: TrainConfig) -> _Steps:
    folder = subject.folder / name
    profile = _measured(subject, config, folder)
    progress(f"{config.workers} ranks without failures")
    run = _chameleon.train(config, run=folder / "run", timeout_s=subject.timeout_s)
    report = json.loads(_command("report", str(run.path), "--json", timeout_s=subject.timeout_s))["generations"][0]
    (planned,) = read_generation_plans(run.plans).values()
    costs = costs_of_run(config, read_profile(profile), dict.fromkeys(range(config.workers), ""))
    return _Steps(
        measured_s=statistics.median(step["measured_s"] for step in report["steps"][1:]),
        predicted=estimate_step(planned.plan, planned.program, costs),
        report=report,
    )


def alone(subject: Subject) -> Result:
    """Compare the steps of one rank, which has the device for itself, with the prediction by its profile."""
    config = _config(subject, policy="reroute", workers=1, parallel=Parallel(dp=1, pp=1), timelines=Timelines(every=1))
    found = _timed(subject, "alone", config)
    figures = {
        "by the profile": found.predicted.step_s,
        "by the run's own operations": found.report["predicted_step_s"],
    }
    return Result(
        columns=("step of one rank", "ms", "over measured"),
        rows=_over_measured(found, figures),
        bars=(
            Bar(
                name="|error| of the step by the profile",
                value=abs(found.predicted.step_s / found.measured_s - 1),
                limit=_STEP_ERROR,
            ),
        ),
        data={"measured_s": found.measured_s, "predicted_s": figures, "report": found.report},
    )


def _over_measured(found: _Steps, figures: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    measured = ("measured, median", f"{1e3 * found.measured_s:.1f}", "1.000")
    predicted = ((name, f"{1e3 * each:.1f}", f"{each / found.measured_s:.3f}") for name, each in figures.items())
    return (measured, *predicted)


def steps(subject: Subject) -> Result:
    """Compare the steps of a run without failures with three predictions."""
    found = _timed(subject, "steps", _config(subject, policy="reroute", timelines=Timelines(every=1)))
    figures = {
        "by the run's own operations": found.report["predicted_step_s"],
        "by the profile, each rank with a device of its own": found.predicted.step_s,
        "by the profile, all operations one after the other": sum(found.predicted.busy_s.values()),
    }
    return Result(
        columns=("step of four ranks", "ms", "over measured"),
        rows=_over_measured(found, figures),
        bars=(
            Bar(
                name="|error| of the step by the run's own operations",
                value=abs(found.report["predicted_step_s"] / found.measured_s - 1),
                limit=_STEP_ERROR,
            ),
        ),
        remarks=(
            "ranks that share a device take longer than one alone and less than all in turn, as far as one does not "
            "fill it; so only the first prediction has a bar",
        ),
        data={"measured_s": found.measured_s, "predicted_s": figures, "report": found.report},
    )


def salvage(subject: Subject) -> Result:
    """Kill a rank in a backward: the step is completed, and all losses are those of the plain loop."""
    return _completed(subject, "salvage", _config(subject, policy="reroute"), limit=_DEVIATION)


def in_bf16(subject: Subject) -> Result:
    """Do the same in bf16, with the optimizer's state shared by two owners."""
    shared = Parallel(dp=2, pp=2, optimizer_redundancy=2)
    config = _config(subject, policy="reroute", in_bf16=True, parallel=shared)
    return _completed(subject, "in-bf16", config, limit=_BF16_DEVIATION)


def _completed(subject: Subject, name: str, config: TrainConfig, *, limit: float) -> Result:
    """Kill a rank in a backward, and compare the losses with those of the plain loop."""
    progress(f"four ranks, one of which is killed, in {config.precision}")
    failure = Failure(worker=_WORKERS - 1, step=_LOST_IN_STEP, phase="backward")
    run = _chameleon.train(config, run=subject.folder / name, failures=[failure], timeout_s=subject.timeout_s)
    (lost,) = run.failures()
    verified = _verified(run, subject)
    return Result(
        columns=("killed", "stall, s", "repeated, s", "largest deviation of a loss"),
        rows=(
            (
                f"worker {lost.worker} in step {lost.step}",
                f"{lost.stall_s:.3f}",
                "-" if lost.repeated_s is None else f"{lost.repeated_s:.3f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            ),
        ),
        bars=(
            Bar(name="interrupted steps that were salvaged", value=float(lost.is_salvaged), limit=1.0, at_least=True),
            _bar_of(verified, limit),
        ),
        data={"verified": verified, "stall_s": lost.stall_s, "is_salvaged": lost.is_salvaged},
    )


def snapshots(subject: Subject) -> Result:
    """Kill the only holder of some layers: the run goes back to a snapshot, and no loss changes."""
    progress("four ranks with snapshots, one of which is killed with its layers")
    failure = Failure(worker=1, step=2 * _LOST_IN_STEP, phase="backward")
    parallel = Parallel(dp=1, pp=_WORKERS)
    config = _config(subject, policy="reroute", parallel=parallel, snapshots=Snapshots(every=_SNAPSHOT_EVERY))
    run = _chameleon.train(config, run=subject.folder / "snapshots", failures=[failure], timeout_s=subject.timeout_s)
    (lost,) = run.failures()
    verified = _verified(run, subject)
    repeated = lost.step - lost.resume_step
    return Result(
        columns=("killed", "source", "steps repeated", "stall, s", "transfer, s", "largest deviation of a loss"),
        rows=(
            (
                f"worker {lost.worker} in step {lost.step}",
                lost.policy,
                str(repeated),
                f"{lost.stall_s:.3f}",
                f"{lost.transfer_s:.3f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            ),
        ),
        bars=(
            Bar(name="returns to a snapshot", value=float(lost.policy == "snapshot"), limit=1.0, at_least=True),
            Bar(name="steps repeated", value=float(repeated), limit=float(_SNAPSHOT_EVERY)),
            _bar_of(verified),
        ),
        data={"verified": verified, "stall_s": lost.stall_s, "transfer_s": lost.transfer_s},
    )


def migration(subject: Subject) -> Result:
    """Drain the only holder of some layers: they move while all ranks train, and no loss changes."""
    progress("four ranks, one of which is drained while its layers move")
    several = {"steps": 2 * subject.size.steps}  # it is drained and its layers have moved long before the end
    config = _config(subject, policy="chameleon", parallel=Parallel(dp=1, pp=_WORKERS), **several)
    path = subject.folder / "migration"
    command = [sys.executable, "-m", "chameleon_ft", "train", str(write_config(config, path.with_suffix(".toml")))]
    run = RunDirectory(path)
    with child([*command, "--output-dir", str(path)], log=path.with_suffix(".log")) as process:
        _await_steps(run, _LOST_IN_STEP, process, timeout_s=subject.timeout_s)
        drain(run, workers=[_WORKERS - 1])
        code = process.wait(subject.timeout_s)
    if code:
        raise SystemExit(f"{path}: ended with exit code {code}; see {path.with_suffix('.log')}")
    joins = [event for event in run.events() if event["event"] == "join" and event["drained"]]
    moved_bytes = sum(event["moved_bytes"] for event in joins)
    stopped_s = max((event["stop_s"] for event in joins), default=0.0)
    verified = _verified(run, subject)
    return Result(
        columns=("drained", "bytes moved", "moved for, s", "stall at the switch, s", "largest deviation of a loss"),
        rows=tuple(
            (
                f"worker {event['drained'][0]} before step {event['resume_step']}",
                f"{event['moved_bytes']:,}",
                f"{event['migrate_s']:.3f}",
                f"{event['stall_s']:.3f}",
                f"{verified['max_relative_loss_deviation']:.1e}",
            )
            for event in joins
        ),
        bars=(
            Bar(name="bytes that moved while training", value=float(moved_bytes), limit=1.0, at_least=True),
            Bar(name="seconds for which workers stopped", value=stopped_s, limit=0.0),
            _bar_of(verified),
        ),
        data={"verified": verified, "joins": joins},
    )


def _config(subject: Subject, *, policy: PolicyName, **changes: Any) -> TrainConfig:
    """Return a run of four ranks, by default in float32, so that losses can be compared to their last digits."""
    fields: dict[str, Any] = {
        "workers": _WORKERS,
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
    return config_of(subject, subject.size.run_model, **fields).model_copy(update={"threads": 1})


def _measured(subject: Subject, config: TrainConfig, folder: Path) -> Path:
    """Measure the profile of a run as a user does, in a process of its own, which leaves the device afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "profile.json"
    file = write_config(config, folder / "profile.toml")
    progress("profile of the model that four ranks train")
    repeats = str(subject.size.repeats)
    _command("profile", str(file), "--out", str(out), "--repeats", repeats, timeout_s=subject.timeout_s)
    return out


def _await_steps(run: RunDirectory, number: int, process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Wait until a run has committed so many steps."""
    tail, committed, deadline = Tail(run.metrics_file), 0, time.monotonic() + timeout_s
    while committed < number:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{run.path}: has not trained {number} steps; see {run.path.with_suffix('.log')}")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        committed += sum(1 for _ in tail.new())


def _verified(run: RunDirectory, subject: Subject) -> dict[str, Any]:
    progress(f"the plain loop of {run.path.name}")
    # Its exit code, like its output, says whether the losses agree.
    text = _command("verify", str(run.path), "--json", timeout_s=subject.timeout_s, codes=(0, 1))
    found: dict[str, Any] = json.loads(text)
    return found


def _bar_of(verified: dict[str, Any], limit: float = _DEVIATION) -> Bar:
    value = verified["max_relative_loss_deviation"]
    return Bar(name="largest relative deviation of a loss from the plain loop", value=value, limit=limit)


def _command(*arguments: str, timeout_s: float, codes: Collection[int] = (0,)) -> str:
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
